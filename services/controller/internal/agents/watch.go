package agents

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Watcher keeps an index up to date with the allocator.
type Watcher struct {
	// Allocator has the Registry.
	Allocator allocatorv1.AllocatorServiceClient
	// Index is kept up to date.
	Index *Index
	// Conns are the connections to agents. Those of removed agents are closed.
	Conns *Conns
	// Clock times the reconnects.
	Clock clock.Clock
}

// Start watches until ctx ends. A stream that was synced and breaks is opened again at once, others with backoff. An
// allocator replica that does not lead refuses the stream or ends it, so that the stream follows the leader.
func (w *Watcher) Start(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx).WithName("agents")
	delays := backoff.New(w.Clock, backoff.Policy{Initial: 100 * time.Millisecond, Max: time.Second})
	for {
		synced, err := w.watch(ctx)
		w.Index.end()
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the stream ended because ctx did
		}
		if synced {
			delays.Reset()
			log.Info("agent stream broken", obs.KeyError, err)
			continue
		}
		log.V(2).Info("agent stream unavailable", obs.KeyError, err)
		if delays.Wait(ctx) != nil {
			return nil //nolint:nilerr // the watch was ended
		}
	}
}

// NeedLeaderElection implements manager.LeaderElectionRunnable: only the leader uses the index.
func (w *Watcher) NeedLeaderElection() bool { return true }

// watch follows one stream until it breaks, and reports whether it was synced.
func (w *Watcher) watch(ctx context.Context) (synced bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w.Index.begin()
	stream, err := w.Allocator.WatchAgents(ctx, &allocatorv1.WatchAgentsRequest{})
	if err != nil {
		return false, fmt.Errorf("watching agents: %w", rpc.FromStatus(err))
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return synced, fmt.Errorf("watching agents: %w", rpc.FromStatus(err))
		}
		w.Index.apply(m)
		switch m.GetType() { //nolint:exhaustive // the others only change the index
		case allocatorv1.WatchAgentsResponse_TYPE_SYNCED:
			synced = true
			logr.FromContextOrDiscard(ctx).WithName("agents").Info("registry synced")
		case allocatorv1.WatchAgentsResponse_TYPE_AGENT_GONE:
			w.Conns.Drop(m.GetAgent().GetAddress())
		}
	}
}
