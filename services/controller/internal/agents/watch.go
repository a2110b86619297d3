package agents

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = time.Second
)

// Watcher keeps an index in step with the allocator.
type Watcher struct {
	// Allocator is where the Registry is.
	Allocator allocatorv1.AllocatorServiceClient
	// Index is what is kept.
	Index *Index
	// Conns loses the connections to agents that are gone.
	Conns *Conns
	// Clock times the reconnects.
	Clock clock.Clock
}

// Start watches until ctx ends, and connects anew whenever the stream breaks: at once the first time, then after 100 ms,
// doubling up to 1 s until a stream has synced again. So it follows the allocator's lead from one replica to the other; one
// that does not lead may refuse the stream, or end it.
func (w *Watcher) Start(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx).WithName("agents")
	delay := time.Duration(0)
	for {
		synced, err := w.watch(ctx)
		w.Index.end()
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the end was asked for, and broke the stream
		}
		if synced {
			delay = 0
			log.Info("agent stream broken", "err", errorText(err))
		} else {
			log.V(2).Info("agent stream not to be had", "err", errorText(err))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-w.Clock.After(delay):
		}
		delay = min(max(2*delay, minBackoff), maxBackoff)
	}
}

// NeedLeaderElection is true: only the leader acts on what is known.
func (w *Watcher) NeedLeaderElection() bool { return true }

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
		switch m.GetType() { //nolint:exhaustive // only two matter here
		case allocatorv1.WatchAgentsResponse_TYPE_SYNCED:
			synced = true
			logr.FromContextOrDiscard(ctx).WithName("agents").Info("registry read")
		case allocatorv1.WatchAgentsResponse_TYPE_AGENT_GONE:
			w.Conns.Drop(m.GetAgent().GetAddress())
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return "end of stream"
	}
	return err.Error()
}
