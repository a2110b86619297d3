package cmd

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// attach prints the output of a new sandbox until its process has ended. If remove is set, it deletes the sandbox then. An exit
// code other than 0 is returned as a exitError.
func attach(ctx context.Context, c *cli, client sandboxv1.SandboxServiceClient, s *sandboxv1.Sandbox, remove bool) error {
	code, err := follow(ctx, c, client, s)
	if remove {
		if cleanErr := removeSandbox(ctx, c, client, s); cleanErr != nil {
			c.infof("sandbox %q is not deleted: %v", s.GetName(), cleanErr)
			err = errors.Join(err, cleanErr)
		}
	} else if interrupted(ctx, err) {
		c.infof("sandbox %q is still running; delete it with: %s delete -n %s %s", s.GetName(), c.program(), s.GetNamespace(), s.GetName())
	}
	if err != nil {
		return err
	}
	if code == 0 {
		return nil
	}
	return exitError{code}
}

func follow(ctx context.Context, c *cli, client sandboxv1.SandboxServiceClient, s *sandboxv1.Sandbox) (int, error) {
	in := &sandboxv1.StreamLogsRequest{Namespace: s.GetNamespace(), Name: s.GetName(), Follow: true}
	if err := copyLogs(ctx, c, in, publicLogs(client, in)); err != nil {
		return 0, err
	}
	return exitCode(ctx, c, client, s)
}

// exitCode returns the exit code of a sandbox's process, whose output has ended. It waits until the code is known.
func exitCode(ctx context.Context, c *cli, client sandboxv1.SandboxServiceClient, s *sandboxv1.Sandbox) (int, error) {
	gone := fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "sandbox %q was deleted before its process ended", s.GetName())
	var last *sandboxv1.Sandbox
	err := watchUntil(ctx, c, client, s, "waiting for the exit code", func(now *sandboxv1.Sandbox) bool {
		last = now
		if now == nil {
			return true
		}
		st := now.GetStatus()
		return st.ExitCode != nil || st.GetPhase() == sandboxv1.Phase_PHASE_FAILED || st.GetPhase() == sandboxv1.Phase_PHASE_EXPIRED
	})
	if err != nil {
		return 0, err
	}
	st := last.GetStatus()
	switch {
	case last == nil:
		return 0, gone
	case st.ExitCode != nil:
		if st.GetReason() == "OOMKilled" {
			c.infof("the process ran out of memory (exit code %d)", st.GetExitCode())
		}
		return int(st.GetExitCode()), nil
	case st.GetPhase() == sandboxv1.Phase_PHASE_EXPIRED:
		return 0, fault.New(errdefs.ErrFailedPrecondition, fault.PhaseConflict, "sandbox %q expired before its process ended", s.GetName())
	default:
		return 0, fault.New(errdefs.ErrUnknown, "", "sandbox %q failed: %s %s", s.GetName(), st.GetReason(), st.GetMessage())
	}
}

// watchUntil calls done with every state of the sandbox until done reports true. nil means that the sandbox does not exist, or
// that another one has its name. It continues after a restart of the allocator and is bounded by the timeout.
func watchUntil(ctx context.Context, c *cli, client sandboxv1.SandboxServiceClient, s *sandboxv1.Sandbox, doing string, done func(*sandboxv1.Sandbox) bool) error {
	_, err := call(ctx, c, doing, func(ctx context.Context) (struct{}, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := client.WatchSandboxes(ctx, &sandboxv1.WatchSandboxesRequest{Namespace: s.GetNamespace(), Name: s.GetName()})
		if err != nil {
			return struct{}{}, err
		}
		defer cancelStream(cancel, stream)
		seen := false
		for {
			event, err := stream.Recv()
			if err != nil {
				return struct{}{}, ended(err)
			}
			same := s.GetUid() == "" || event.GetSandbox().GetUid() == s.GetUid()
			var now *sandboxv1.Sandbox
			switch event.GetType() {
			case sandboxv1.WatchSandboxesResponse_TYPE_SYNCED:
				if seen {
					continue
				}
			case sandboxv1.WatchSandboxesResponse_TYPE_DELETED:
				if !same {
					continue
				}
			default:
				if seen = true; same {
					now = event.GetSandbox()
				}
			}
			if done(now) {
				return struct{}{}, nil
			}
		}
	})
	return err
}

// cancelStream ends a stream early and waits for its end: a call that has not ended when the process exits is missing in the
// trace.
func cancelStream[T any](cancel context.CancelFunc, stream grpc.ServerStreamingClient[T]) {
	cancel()
	for {
		if _, err := stream.Recv(); err != nil {
			return
		}
	}
}

// removeSandbox deletes the sandbox of `run --rm` by its uid, also if ctx has ended.
func removeSandbox(ctx context.Context, c *cli, client sandboxv1.SandboxServiceClient, s *sandboxv1.Sandbox) error {
	ctx = context.WithoutCancel(ctx)
	in := &sandboxv1.DeleteSandboxRequest{
		Namespace: s.GetNamespace(), Name: s.GetName(), Uid: s.GetUid(), GracePeriod: durationpb.New(removeGrace), RequestId: uuid.NewString(),
	}
	_, err := call(ctx, c, "deleting "+s.GetName(), func(ctx context.Context) (*sandboxv1.DeleteSandboxResponse, error) {
		return client.DeleteSandbox(ctx, in)
	})
	if isNotFound(err, fault.SandboxNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("deleting sandbox %q: %w", s.GetName(), err)
	}
	return watchUntil(ctx, c, client, s, "waiting for "+s.GetName()+" to end", func(now *sandboxv1.Sandbox) bool { return now == nil })
}
