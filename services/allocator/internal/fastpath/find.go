package fastpath

import (
	"context"
	"time"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

const (
	// absenceTimeout is how long a call waits until it is certain that a sandbox does not exist.
	absenceTimeout = time.Second
	absencePeriod  = absenceTimeout / 20
)

// find returns a sandbox that is to be changed. One that this process does not know may have been written, or started, by a
// former leader a moment before its end, or by a later one while this process was stopped: only the API server, the agents and
// the Lease together can say that there is none. One that is known in outline is returned so.
func (s *Server) find(ctx context.Context, key store.Key) (store.Item, error) {
	if item, ok := s.config.Store.Get(key); ok {
		return item, nil
	}
	there, err := s.api.Lookup(ctx, key, "")
	switch {
	case ctx.Err() != nil:
		return store.Item{}, fault.FromContext(ctx, "asking the API server for the sandbox", err)
	case err != nil:
		return store.Item{}, apiserver.Unavailable(err)
	case there != nil:
		s.recovery.ResourceSeen(there)
	default:
		if err := s.confirmAbsent(ctx, key); err != nil {
			return store.Item{}, err
		}
	}
	if item, ok := s.config.Store.Get(key); ok {
		return item, nil
	}
	return store.Item{}, s.missing(key)
}

// confirmAbsent returns an error unless it is certain that no sandbox of the name exists.
func (s *Server) confirmAbsent(ctx context.Context, key store.Key) error {
	for _, check := range []func(store.Key) error{s.agentsReported, s.attemptsSettled} {
		if err := s.await(ctx, "making sure that the sandbox does not exist", func() error { return check(key) }); err != nil {
			return err
		}
	}
	switch sure, err := s.config.Leadership.Confirm(ctx); {
	case err != nil:
		return apiserver.Unavailable(err)
	case !sure:
		return deletion.LostLeadership(nil)
	}
	return nil
}

// await waits a moment for a check to succeed: an agent that has just started soon reports, and the container of an attempt that was given
// up is soon gone. doing says what it waits for.
func (s *Server) await(ctx context.Context, doing string, check func() error) error {
	until := s.config.Clock.Now().Add(absenceTimeout)
	for {
		err := check()
		if err == nil || s.config.Clock.Now().After(until) {
			return err
		}
		timer := s.config.Clock.NewTimer(absencePeriod)
		select {
		case <-ctx.Done():
			timer.Stop()
			return fault.FromContext(ctx, doing, err)
		case <-timer.C():
		}
	}
}

// attemptsSettled returns an error while a create under the name may still have left a container: should this process end,
// the next one would find it.
func (s *Server) attemptsSettled(key store.Key) error {
	if !s.creator.Unsettled(key) {
		return nil
	}
	return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "what a create of sandbox %s may have left is still being deleted", key).
		RetryIn(time.Second)
}

// agentsReported returns an error if an agent that may have the sandbox has not reported since this process leads.
func (s *Server) agentsReported(key store.Key) error {
	for _, a := range s.config.Fleet.Agents(key.Namespace, "") {
		if !s.config.Announced(a.GetInfo().GetPodUid()) && !s.config.Agents.Gone(a.GetInfo().GetPodUid()) {
			return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable,
				"sandbox %s is not known, and agent %s, which may have it, has not reported yet", key, a.GetInfo().GetPodName()).RetryIn(time.Second)
		}
	}
	return nil
}

// get returns a sandbox that is to be shown, as far as this process knows.
func (s *Server) get(ctx context.Context, key store.Key) (store.Item, error) {
	item, ok := s.config.Store.Get(key)
	if !ok {
		return store.Item{}, s.missing(key)
	}
	return s.load(ctx, item)
}

// load returns a sandbox whose spec and status are known.
func (s *Server) load(ctx context.Context, item store.Item) (store.Item, error) {
	loaded, ok, err := s.recovery.Load(ctx, item)
	if err == nil && !ok {
		err = s.missing(item.Key)
	}
	return loaded, err
}

// awaitFilled returns an error unless the spec and the status of each sandbox are known, after a moment at most: a partial list would be
// taken for the whole.
func (s *Server) awaitFilled(ctx context.Context) error {
	if !s.config.Pools.Synced() {
		return apiserver.Unavailable(nil)
	}
	return s.await(ctx, "waiting for all sandboxes", func() error {
		if s.config.Store.Filled() {
			return nil
		}
		return fault.New(errdefs.ErrUnavailable, fault.APIUnavailable, "the sandboxes are still being read from the Kubernetes API server").RetryIn(time.Second)
	})
}

// missing returns the error for a sandbox that is not in the store.
func (s *Server) missing(key store.Key) error {
	if !s.config.Pools.Synced() {
		return apiserver.Unavailable(nil)
	}
	return fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "sandbox %s does not exist", key).With("sandbox", key.String())
}

// otherUID returns the error of a call that names the uid of another sandbox.
func otherUID(key store.Key, uid string) error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "sandbox %s has the uid %s", key, uid).With("uid", uid)
}
