package fastpath

import (
	"context"
	"errors"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/reap"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// DefaultSettle is how long a write that was sent may still land. The client that sent it gives up after 5 s, and the API
// server ends a request after 60 s (its --request-timeout). What a process writes that was stopped in the middle for longer
// than this is caught by the uids that every replica remembers for an hour.
const DefaultSettle = 90 * time.Second

// buryParallel is how many calls to the API server burials make at once.
const buryParallel = 16

// errStill is why a burial looks again.
var errStill = errors.New("it is still there")

// burial is a deletion that its agent's tombstone makes durable, on its way to where nothing is left to remember:
//
//	            CR deleted                       container gone
//	accepted -+------------> going, settled ---+----------------> forgotten by the agent
//	          | CR absent                      | settle time, CR absent again
//	          +------------> absent -----------+
//
// Only a custom resource that was seen, or never written for certain, is settled from the start: of any other a write may
// be on its way, sent by a former leader or by this one. A burial whose process stops leading ends; the agent reports the
// tombstone to the next leader, who begins anew.
type burial struct {
	tombstone *agentv1.Tombstone
	// drive is the container's deletion, if it is this process's.
	drive *reap.Drive
	// Server.mu guards accepted: the agent has the tombstone.
	accepted bool

	// The rest is the burial's goroutine's own.
	room    bool // it counts as a pending write
	settled bool // no write can land (again)
	absent  bool // the API server holds no custom resource
}

func (b *burial) fence() *agentv1.Fence { return b.tombstone.GetFence() }

func (b *burial) name() store.Key {
	return store.Key{Namespace: b.tombstone.GetNamespace(), Name: b.tombstone.GetName()}
}

func (s *Server) tombstoneOf(item store.Item) *agentv1.Tombstone {
	return &agentv1.Tombstone{
		Fence: item.Fence, Namespace: item.Key.Namespace, Name: item.Key.Name, RequestId: item.RequestID,
		DeleteTime: timestamppb.New(s.config.Clock.Now()),
	}
}

// buried tells whether a deletion was accepted by this leader or a former one.
func (s *Server) buried(key identity.Fence) bool {
	s.mu.Lock()
	b := s.burials[key]
	accepted := b != nil && b.accepted
	s.mu.Unlock()
	return accepted || s.config.Graves.HasTombstone(key)
}

// entomb has the agent keep a deletion, and carry it out. The key is locked. An error says that the deletion is not
// durable; unless it says that it goes on, it was given up.
func (s *Server) entomb(ctx context.Context, item store.Item, b *burial, stopped *job, grace *durationpb.Duration) error {
	key := identity.FenceOf(item.Fence)
	s.mu.Lock()
	s.burials[key] = b
	s.mu.Unlock()
	b.drive = s.reaper.Drive(reap.Order{Fence: item.Fence, Grace: grace, Tombstone: b.tombstone})
	if accepted, err := s.awaitAccepted(ctx, b.drive); err != nil {
		return err
	} else if !accepted {
		if b.drive.Withdraw() {
			s.spare(item, b, stopped)
			return s.errUndeleted(b.drive.Err(), false)
		}
		s.bury(item.Key, b)
		return s.errUndeleted(b.drive.Err(), true)
	}
	s.store.MarkDeleting(item.Key, item.Sandbox.GetUid())
	kept := b.drive.Kept()
	if !kept && !b.absent {
		// The container is gone, with its agent perhaps, and nobody but the API server can be told.
		if err := s.resolve(ctx, b); err != nil {
			s.bury(item.Key, b)
			return errAPI(err)
		}
	}
	s.bury(item.Key, b)
	return nil
}

// awaitAccepted waits for the agent's word, not longer than it may be worth anything.
func (s *Server) awaitAccepted(ctx context.Context, d *reap.Drive) (bool, error) {
	timer := s.config.Clock.NewTimer(agentPatience)
	defer timer.Stop()
	ticker := s.config.Clock.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-d.Accepted():
			return true, nil
		case <-ctx.Done():
			return false, errContext(ctx, "deleting the container", d.Err())
		case <-timer.C():
			return false, nil
		case <-ticker.C():
			if !s.config.Lead.Leads() {
				return false, nil
			}
		}
	}
}

// spare takes a deletion back that no agent has heard of.
func (s *Server) spare(item store.Item, b *burial, stopped *job) {
	s.mu.Lock()
	delete(s.burials, identity.FenceOf(item.Fence))
	s.mu.Unlock()
	s.leaveRoom(b)
	if stopped != nil && item.Resource == nil {
		s.writer.AdmitAlways()
		s.persist(stopped.record, stopped.ours && b.settled)
	}
}

// bury has a burial carried on in the background.
func (s *Server) bury(key store.Key, b *burial) {
	s.mu.Lock()
	b.accepted = true
	s.mu.Unlock()
	s.config.Tasks.Go(func(ctx context.Context) {
		err := s.runBurial(ctx, b)
		s.leaveRoom(b)
		s.mu.Lock()
		delete(s.burials, identity.FenceOf(b.fence()))
		s.mu.Unlock()
		if err != nil {
			logr.FromContextOrDiscard(ctx).V(2).Info("leaving a tombstone to the next leader", "sandbox", key.String(), "reason", err.Error())
		}
	})
}

// sweepGraves takes up the tombstones that agents report and nobody here works on: a former leader's.
func (s *Server) sweepGraves() {
	s.sweepLate()
	for _, t := range s.config.Graves.Tombstones() {
		key := identity.FenceOf(t.GetFence())
		if !s.config.Announced(key.AgentUID) {
			continue
		}
		s.mu.Lock()
		_, ok := s.burials[key]
		b := &burial{tombstone: t}
		if !ok {
			s.burials[key] = b
		}
		s.mu.Unlock()
		if !ok {
			s.bury(b.name(), b)
		}
	}
}

func (s *Server) leaveRoom(b *burial) {
	if b.room {
		b.room = false
		s.writer.Abandon()
	}
}

// runBurial returns nil when the agent has forgotten the tombstone, and the sandbox is gone from the store.
func (s *Server) runBurial(ctx context.Context, b *burial) error {
	uid := b.fence().GetSandboxUid()
	if !b.absent {
		if err := s.persevere(ctx, func(ctx context.Context) error { return s.resolve(ctx, b) }); err != nil {
			return err
		}
	}
	s.leaveRoom(b)
	if err := s.awaitRemoval(ctx, b); err != nil {
		return err
	}
	for b.absent && !s.store.MarkGone(b.name(), uid) { // it landed in the very moment, or the informer is behind
		if err := s.pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
		if err := s.persevere(ctx, func(ctx context.Context) error { return s.resolve(ctx, b) }); err != nil {
			return err
		}
	} // the name is free; what may land yet is dead to the writer
	if !b.settled {
		if err := s.pause(ctx, s.config.Settle); err != nil {
			return err
		}
		if err := s.persevere(ctx, func(ctx context.Context) error { return s.resolve(ctx, b) }); err != nil {
			return err
		}
	}
	if err := s.persevere(ctx, func(ctx context.Context) error { return s.forget(ctx, b) }); err != nil {
		return err
	}
	return s.persevere(ctx, func(ctx context.Context) error { return s.vanished(ctx, b) })
}

// resolve deletes the custom resource, if there is one.
func (s *Server) resolve(ctx context.Context, b *burial) error {
	found, err := s.lookup(ctx, b.name(), b.fence().GetSandboxUid())
	if err != nil {
		return err
	}
	if found == nil {
		b.absent = true
		return nil
	}
	s.store.SetResource(found)
	if found.DeletionTimestamp == nil {
		ctx, cancel := context.WithTimeout(ctx, apiPatience)
		defer cancel()
		if err := s.deleteByUID(ctx, found); err != nil {
			return err
		}
	}
	b.absent, b.settled = false, true
	return nil
}

// awaitRemoval waits until the container is gone from its agent.
func (s *Server) awaitRemoval(ctx context.Context, b *burial) error {
	if b.drive != nil {
		select {
		case <-b.drive.Done():
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	key := identity.FenceOf(b.fence())
	return s.persevere(ctx, func(context.Context) error {
		if s.config.Graves.Reported(key) && !s.config.Agents.Gone(key.AgentUID) {
			return errStill
		}
		return nil
	})
}

// forget tells the agent that nothing is left to be remembered.
func (s *Server) forget(ctx context.Context, b *burial) error {
	if s.config.Agents.Gone(b.fence().GetAgentUid()) {
		return nil
	}
	client, ok := s.config.Agents.Client(b.fence().GetAgentUid())
	if !ok {
		return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "there is no connection to the agent")
	}
	ctx, cancel := context.WithTimeout(ctx, apiPatience)
	defer cancel()
	_, err := client.ForgetTombstone(ctx, &agentv1.ForgetTombstoneRequest{Fence: b.fence()})
	if err = rpc.FromStatus(err); errdefs.IsNotFound(err) || fault.ReasonOf(err) == fault.FenceMismatch {
		return nil
	}
	return err
}

// vanished tells, by nil, that neither agent nor API server know of the sandbox any more. The informer may miss the end of a
// custom resource that it never showed.
func (s *Server) vanished(ctx context.Context, b *burial) error {
	if s.config.Graves.HasTombstone(identity.FenceOf(b.fence())) {
		return errStill
	}
	if b.absent || s.store.Gone(b.fence().GetSandboxUid()) {
		return nil
	}
	if found, err := s.lookup(ctx, b.name(), b.fence().GetSandboxUid()); err != nil || found != nil {
		return errStill
	}
	s.store.MarkGone(b.name(), b.fence().GetSandboxUid())
	return nil
}

// persevere repeats f until it succeeds, ctx ends or this process does not lead any more.
func (s *Server) persevere(ctx context.Context, f func(context.Context) error) error {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 20*time.Millisecond, 2*time.Second
	for {
		if !s.config.Lead.Leads() {
			return errDeposed(nil)
		}
		err := f(ctx)
		if err == nil {
			return nil
		}
		logr.FromContextOrDiscard(ctx).V(4).Info("burying again", "err", err.Error())
		if err := s.pause(ctx, wait.NextBackOff()); err != nil {
			return err
		}
	}
}

func (s *Server) pause(ctx context.Context, d time.Duration) error {
	timer := s.config.Clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C():
		return nil
	}
}
