package fastpath

import (
	"context"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/reap"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/writer"
)

const (
	// apiPatience is how long a call waits for an API server that does not answer, if its caller would wait longer.
	apiPatience = 5 * time.Second
	// shortPatience is the same for who has another way, as a delete has; awayPatience, if the API server did not answer before.
	shortPatience = time.Second
	awayPatience  = 200 * time.Millisecond
	// agentPatience is how long a delete waits for the agent's word that it is durable there.
	agentPatience = 5 * time.Second
)

// DeleteSandbox implements sandboxv1.SandboxServiceServer. The durable fact that it waits for is the custom resource's
// deletion where there is one and the API server answers, and otherwise the agent's tombstone.
func (s *Server) DeleteSandbox(ctx context.Context, req *sandboxv1.DeleteSandboxRequest) (*sandboxv1.DeleteSandboxResponse, error) {
	key := store.Key{Namespace: req.GetNamespace(), Name: req.GetName()}
	unlock, err := s.locks.Lock(ctx, key)
	if err != nil {
		return nil, errContext(ctx, "waiting for other work on the sandbox", nil)
	}
	item, err := s.find(ctx, key)
	if err == nil && req.GetUid() != "" && req.GetUid() != item.Sandbox.GetUid() {
		err = errOther(key, item.Sandbox.GetUid())
	}
	if err != nil {
		unlock()
		return nil, err
	}
	before := proto.CloneOf(item.Sandbox)
	if before.GetDeleteTime() == nil {
		before.DeleteTime = timestamppb.New(s.config.Clock.Now())
	}
	before.Status.Phase = sandboxv1.Phase_PHASE_TERMINATING
	// The deletion goes on when the caller leaves: a write that was stopped is not taken up again.
	done := make(chan error, 1)
	s.config.Tasks.Go(func(ctx context.Context) {
		defer unlock()
		done <- s.delete(ctx, item, req.GetGracePeriod())
	})
	select {
	case err := <-done:
		if err != nil {
			return nil, err
		}
		return &sandboxv1.DeleteSandboxResponse{Sandbox: before}, nil
	case <-ctx.Done():
		return nil, errContext(ctx, "deleting the sandbox", nil)
	}
}

func errOther(key store.Key, uid string) error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "sandbox %s has the uid %s", key, uid).With("uid", uid)
}

// delete makes a deletion durable. The key is locked.
func (s *Server) delete(ctx context.Context, item store.Item, grace *durationpb.Duration) error {
	if item.Fence != nil && s.buried(identity.FenceOf(item.Fence)) { // accepted before
		s.hasten(item, grace)
		return nil
	}
	resource, outcome, stopped := s.stopWrite(ctx, item)
	if resource == nil {
		return s.deleteUnwritten(ctx, item, outcome, stopped, grace)
	}
	err := s.deleteResource(ctx, item, resource, grace)
	if fault.ReasonOf(err) != fault.APIUnavailable {
		return err
	}
	if item.Fence == nil || s.config.Agents.Gone(item.Fence.GetAgentUid()) {
		return err // nobody else could remember it
	}
	if err := s.writer.Admit(); err != nil {
		return err
	}
	return s.entomb(ctx, item, &burial{tombstone: s.tombstoneOf(item), room: true, settled: true}, nil, grace)
}

// deleteUnwritten deletes a sandbox whose custom resource is not known to be there.
func (s *Server) deleteUnwritten(ctx context.Context, item store.Item, outcome writer.Outcome, stopped *job, grace *durationpb.Duration) error {
	b := &burial{tombstone: s.tombstoneOf(item)}
	if clean := stopped != nil && stopped.ours && outcome != writer.Unknown; clean {
		b.settled, b.absent = true, true // nobody else ever wrote it, and this process did not
	} else {
		s.writer.AdmitAlways() // it had room as a write
		b.room = true
	}
	return s.entomb(ctx, item, b, stopped, grace)
}

// stopWrite ends the write behind of a sandbox, if there is one, and returns the custom resource, if it is known to be
// there. A write that does not end soon is Unknown: it ends later, and is never taken up again.
func (s *Server) stopWrite(ctx context.Context, item store.Item) (*v1alpha1.Sandbox, writer.Outcome, *job) {
	uid := item.Sandbox.GetUid()
	j, ok := s.job(uid)
	if !ok {
		// It may have landed since the caller looked. What a former process wrote is not known.
		if now, there := s.store.Get(item.Key); there && now.Sandbox.GetUid() == uid && now.Resource != nil {
			return now.Resource, writer.Landed, nil
		}
		return item.Resource, writer.Unknown, nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.patience())
	defer cancel()
	outcome, there, err := j.Stop(ctx)
	switch {
	case err != nil:
		return item.Resource, writer.Unknown, &j
	case outcome == writer.Landed:
		return there, outcome, &j
	}
	// The informer may have shown what a writer, its answer lost, was about to send again.
	return item.Resource, outcome, &j
}

// patience is how long the API server is waited for by who has another way, or nothing to wait for.
func (s *Server) patience() time.Duration {
	if s.api.away.Load() {
		return awayPatience
	}
	return shortPatience
}

// deleteResource deletes a custom resource, and only the one that is meant, and has the container deleted at once.
func (s *Server) deleteResource(ctx context.Context, item store.Item, resource *v1alpha1.Sandbox, grace *durationpb.Duration) error {
	if resource.DeletionTimestamp == nil {
		ctx, cancel := context.WithTimeout(ctx, s.patience())
		defer cancel()
		if err := s.deleteByUID(ctx, resource); err != nil {
			return err
		}
	}
	s.store.MarkDeleting(item.Key, item.Sandbox.GetUid())
	if item.Fence != nil {
		s.reaper.Drive(reap.Order{Fence: item.Fence, Grace: grace})
	}
	return nil
}

// hasten has a deletion that runs already take a shorter, or longer, grace period.
func (s *Server) hasten(item store.Item, grace *durationpb.Duration) {
	if grace != nil && s.reaper.Driving(identity.FenceOf(item.Fence)) {
		s.reaper.Drive(reap.Order{Fence: item.Fence, Grace: grace})
	}
}

// errUndeleted is the error of a deletion that nobody could be made to remember. heard tells that an agent may have.
func (s *Server) errUndeleted(last error, heard bool) error {
	if !s.config.Lead.Leads() {
		return errDeposed(last)
	}
	if fault.ReasonOf(last) == fault.Overloaded {
		return last
	}
	if heard {
		return fault.Wrap(last, errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent has not answered yet; the deletion goes on").
			RetryIn(time.Second)
	}
	return fault.Wrap(last, errdefs.ErrUnavailable, fault.AgentUnavailable, "the sandbox's agent cannot be reached").RetryIn(time.Second)
}
