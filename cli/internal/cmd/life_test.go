package cmd_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/utils/clock"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func TestDeleteWaits(t *testing.T) {
	w := newLiveAllocator(0)
	f := w.fake()
	// The record is deleted some time after the deletion was accepted.
	f.remove = func(_ context.Context, in *sandboxv1.DeleteSandboxRequest) (*sandboxv1.DeleteSandboxResponse, error) {
		w.mu.Lock()
		s := w.sandboxes[in.GetName()]
		w.deletes = append(w.deletes, in)
		w.mu.Unlock()
		if s == nil {
			return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no sandbox %s", in.GetName())
		}
		return &sandboxv1.DeleteSandboxResponse{Sandbox: s}, nil
	}
	watched := make(chan struct{}, 9)
	f.watch = func(in *sandboxv1.WatchSandboxesRequest, s sandboxv1.SandboxService_WatchSandboxesServer) error {
		watched <- struct{}{}
		return w.watch(in, s)
	}
	b := start(t, f)
	w.sandboxes["web"] = running("web")
	done := make(chan result, 1)
	go func() { done <- b.run(t, "delete", "web", "--grace", "3s") }()
	<-watched
	select {
	case r := <-done:
		t.Fatalf("delete returned before the sandbox was deleted: %+v", r)
	default: // the watch is open, so the command waits for the deletion
	}
	w.change(func() { delete(w.sandboxes, "web") })
	r := <-done
	require.Zero(t, r.code, r.err)
	require.Equal(t, "sandbox \"web\" deleted\n", r.out)
	require.Equal(t, 3*time.Second, w.deletes[0].GetGracePeriod().AsDuration())

	w.sandboxes["web"] = running("web")
	require.Equal(t, "sandbox \"web\" deletion accepted\n", b.run(t, "delete", "web", "--wait=false").out)
	require.Nil(t, w.deletes[1].GetGracePeriod())

	t.Run("another sandbox has the name", func(t *testing.T) {
		f.watch = func(_ *sandboxv1.WatchSandboxesRequest, s sandboxv1.SandboxService_WatchSandboxesServer) error {
			other := running("web")
			other.Uid = "another"
			if err := s.Send(&sandboxv1.WatchSandboxesResponse{Type: sandboxv1.WatchSandboxesResponse_TYPE_ADDED, Sandbox: other}); err != nil {
				return err
			}
			<-s.Context().Done()
			return s.Context().Err()
		}
		require.Zero(t, b.run(t, "delete", "web").code)
	})
	t.Run("not found", func(t *testing.T) {
		require.Equal(t, 3, b.run(t, "delete", "none").code)
		require.Zero(t, b.run(t, "delete", "none", "--ignore-not-found").code)
	})
}

func TestDeleteMany(t *testing.T) {
	w := newLiveAllocator(0)
	f := w.fake()
	f.list = func(_ context.Context, in *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		out := &sandboxv1.ListSandboxesResponse{}
		for _, s := range w.sandboxes {
			if in.GetLabelSelector() == "" || s.GetLabels()["team"] == "red" {
				out.Sandboxes = append(out.Sandboxes, s)
			}
		}
		return out, nil
	}
	b := start(t, f)
	fill := func() {
		for _, name := range strings.Fields("a b c d e f g h i j k") {
			w.sandboxes[name] = running(name)
		}
		w.sandboxes["c"].Labels["team"] = "red"
	}
	fill()
	r := b.run(t, "delete", "-l", "team=red")
	require.Equal(t, "sandbox \"c\" deleted\n", r.out)
	r = b.run(t, "delete", "--all", "-o", "name")
	require.Zero(t, r.code, r.err)
	require.Len(t, strings.Fields(r.out), 10)
	require.Empty(t, w.sandboxes)
	require.Equal(t, "no sandboxes found in namespace default\n", b.run(t, "delete", "--all").err)

	fill()
	r = b.run(t, "delete", "a", "none", "b", "never")
	require.Equal(t, 3, r.code)
	require.Contains(t, r.err, "none")
	require.Contains(t, r.err, "never")
	require.Nil(t, w.sandboxes["b"], "one that is missing keeps no other")
}

func TestUpdate(t *testing.T) {
	var got *sandboxv1.UpdateSandboxRequest
	f := mesh()
	f.update = func(_ context.Context, in *sandboxv1.UpdateSandboxRequest) (*sandboxv1.UpdateSandboxResponse, error) {
		got = in
		return &sandboxv1.UpdateSandboxResponse{Sandbox: running(in.GetSandbox().GetName())}, nil
	}
	b := start(t, f)
	at := timestamppb.New(time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC))
	for line, want := range map[string]*sandboxv1.UpdateSandboxRequest{
		"--ttl 10m":                     updateOf(&sandboxv1.Sandbox{Spec: &sandboxv1.SandboxSpec{ExpireTime: timestamppb.New(now.Add(10 * time.Minute))}}, "spec.expire_time"),
		"--expire 2031-01-01T00:00:00Z": updateOf(&sandboxv1.Sandbox{Spec: &sandboxv1.SandboxSpec{ExpireTime: at}}, "spec.expire_time"),
		"--grace 30s --ttl-after-finished 1h": updateOf(&sandboxv1.Sandbox{Spec: &sandboxv1.SandboxSpec{
			TerminationGracePeriod: durationpb.New(30 * time.Second), TtlAfterFinished: durationpb.New(time.Hour),
		}}, "spec.termination_grace_period", "spec.ttl_after_finished"),
		"--no-expire": updateOf(&sandboxv1.Sandbox{Spec: &sandboxv1.SandboxSpec{}}, "spec.expire_time"),
		"--reset --failure-policy manual": updateOf(&sandboxv1.Sandbox{Uid: "uid-web", Spec: &sandboxv1.SandboxSpec{
			ResetRevision: timestamppb.New(now), FailurePolicy: sandboxv1.FailurePolicy_FAILURE_POLICY_MANUAL,
		}}, "spec.failure_policy", "spec.reset_revision"),
		"--label team=red --label k-": updateOf(&sandboxv1.Sandbox{
			Uid: "uid-web", Labels: map[string]string{"team": "red"}, Spec: &sandboxv1.SandboxSpec{},
		}, "labels"),
	} {
		t.Run(line, func(t *testing.T) {
			r := b.run(t, append([]string{"update", "web"}, strings.Fields(line)...)...)
			require.Zero(t, r.code, r.err)
			require.Contains(t, r.out, "Running")
			require.NotEmpty(t, got.GetRequestId())
			got.RequestId = ""
			require.Empty(t, cmp.Diff(want, got, protocmp.Transform()))
		})
	}
}

// TestResetBehindAnotherClock resets a sandbox that another machine, whose clock is ahead, has reset before.
func TestResetBehindAnotherClock(t *testing.T) {
	var got *sandboxv1.UpdateSandboxRequest
	f := mesh()
	last := now.Add(30 * time.Second)
	f.get = func(_ context.Context, in *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
		sb := running(in.GetName())
		sb.Spec.ResetRevision = timestamppb.New(last)
		return &sandboxv1.GetSandboxResponse{Sandbox: sb}, nil
	}
	f.update = func(_ context.Context, in *sandboxv1.UpdateSandboxRequest) (*sandboxv1.UpdateSandboxResponse, error) {
		got = in
		return &sandboxv1.UpdateSandboxResponse{Sandbox: running(in.GetSandbox().GetName())}, nil
	}
	r := start(t, f).run(t, "update", "web", "--reset")
	require.Zero(t, r.code, r.err)
	require.Equal(t, last.Add(time.Microsecond), got.GetSandbox().GetSpec().GetResetRevision().AsTime())
}

func updateOf(s *sandboxv1.Sandbox, paths ...string) *sandboxv1.UpdateSandboxRequest {
	s.Namespace, s.Name = "default", "web"
	return &sandboxv1.UpdateSandboxRequest{Sandbox: s, UpdateMask: &fieldmaskpb.FieldMask{Paths: paths}}
}

func TestLogs(t *testing.T) {
	var got *sandboxv1.StreamLogsRequest
	b := start(t, &fake{logs: func(in *sandboxv1.StreamLogsRequest, s sandboxv1.SandboxService_StreamLogsServer) error {
		got = in
		return s.Send(&sandboxv1.StreamLogsResponse{Data: []byte("a\xffb")})
	}})
	r := b.run(t, "logs", "web", "--tail", "0", "--since", "5m")
	require.Zero(t, r.code, r.err)
	require.Equal(t, "a\xffb", r.out)
	require.False(t, got.GetFollow())
	require.NotNil(t, got.TailLines)
	require.Equal(t, now.Add(-5*time.Minute), got.GetSince().AsTime())
	b.run(t, "logs", "web", "-f")
	require.True(t, got.GetFollow())
	require.Nil(t, got.TailLines)
}

// TestLogsContinueAfterBreak breaks the stream: nothing is printed twice, and nothing is missing.
func TestLogsContinueAfterBreak(t *testing.T) {
	var mu sync.Mutex
	tries := 0
	b := start(t, &fake{logs: func(in *sandboxv1.StreamLogsRequest, s sandboxv1.SandboxService_StreamLogsServer) error {
		mu.Lock()
		tries++
		try := tries
		mu.Unlock()
		pieces := [][]string{{"one\ntw"}, {"one", "\ntwo\nthr"}, {"one\ntwo\nthree\n"}}[try-1]
		for _, p := range pieces {
			if err := s.Send(&sandboxv1.StreamLogsResponse{Data: []byte(p)}); err != nil {
				return err
			}
		}
		if try < 3 {
			return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "restarting")
		}
		return nil
	}})
	b.clock = clock.RealClock{}
	r := b.run(t, "logs", "web", "-f")
	require.Zero(t, r.code, r.err)
	require.Equal(t, "one\ntwo\nthree\n", r.out)
}

func TestWatch(t *testing.T) {
	send := func(s sandboxv1.SandboxService_WatchSandboxesServer, kind sandboxv1.WatchSandboxesResponse_Type, sb *sandboxv1.Sandbox) {
		_ = s.Send(&sandboxv1.WatchSandboxesResponse{Type: kind, Sandbox: sb})
	}
	var mu sync.Mutex
	streams := 0
	f := &fake{watch: func(_ *sandboxv1.WatchSandboxesRequest, s sandboxv1.SandboxService_WatchSandboxesServer) error {
		mu.Lock()
		streams++
		n := streams
		mu.Unlock()
		if n == 1 {
			send(s, sandboxv1.WatchSandboxesResponse_TYPE_ADDED, running("web"))
			send(s, sandboxv1.WatchSandboxesResponse_TYPE_ADDED, running("going"))
			send(s, sandboxv1.WatchSandboxesResponse_TYPE_SYNCED, nil)
			return fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "too slow")
		}
		send(s, sandboxv1.WatchSandboxesResponse_TYPE_ADDED, running("web"))
		send(s, sandboxv1.WatchSandboxesResponse_TYPE_SYNCED, nil)
		send(s, sandboxv1.WatchSandboxesResponse_TYPE_MODIFIED, exited("web", 7))
		<-s.Context().Done()
		return s.Context().Err()
	}}
	run := func(args ...string) result {
		mu.Lock()
		streams = 0
		mu.Unlock()
		b := start(t, f)
		b.clock = clock.RealClock{}
		ctx, interrupt := context.WithCancel(t.Context())
		done := make(chan result, 1)
		out := &buffer{}
		go func() { done <- b.runTo(ctx, out, args...) }()
		require.Eventually(t, func() bool {
			return strings.Contains(out.String(), "Error")
		}, testkit.Timeout, testkit.Tick, "the last change is the exit")
		interrupt()
		return <-done
	}
	r := run("watch")
	require.Zero(t, r.code, "Ctrl-C is how a watch ends: %s", r.err)
	var events []string
	for line := range strings.Lines(r.out) {
		f := strings.Fields(line)
		events = append(events, strings.Join(f[:3], " "))
	}
	// Nothing is repeated after the break, and the deletion during the break is printed.
	require.Equal(t, []string{"EVENT NAME PHASE", "ADDED web Running", "ADDED going Running", "DELETED going Running", "MODIFIED web Failed"}, events)

	r = run("watch", "-o", "json")
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	require.Len(t, lines, 5, r.out)
	require.Equal(t, `{"type":"TYPE_SYNCED"}`, lines[2])
	require.True(t, slices.IndexFunc(lines, func(l string) bool { return strings.Contains(l, `"exitCode":7`) }) == 4)

	r = run("list", "-w")
	require.Regexp(t, `^NAME +PHASE`, r.out)
}
