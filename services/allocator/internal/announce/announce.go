// Package announce announces a new leader to agents. An agent refuses former leaders once it knows the new term. Until then
// a former leader can still act on the agent, and the agent's reports may change without the new leader. So a leader draws no
// conclusions from an agent's reports before Announced returns true. All methods may be called concurrently.
package announce

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/leadership"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
)

// callTimeout bounds one call.
const callTimeout = 5 * time.Second

// Config is what an Announcer needs.
type Config struct {
	Lead *leadership.View
	// Client returns the connection to an agent; false if there is none (now). Its calls carry the term.
	Client func(agentUID string) (agentv1.AgentServiceClient, bool)
	Tasks  *tasks.Set
	Clock  clock.Clock
}

type agent struct {
	term int64 // the last term that was announced on this connection; 0 for none
	busy bool  // an announcement is under way
}

// Announcer announces terms to agents.
type Announcer struct {
	config Config

	mu     sync.Mutex
	agents map[string]*agent
}

// New returns an announcer without agents. Its calls run in cfg.Tasks.
func New(cfg Config) *Announcer { return &Announcer{config: cfg, agents: map[string]*agent{}} }

// Connected announces the term to an agent whose status stream has begun. It does so again after each reconnect: the agent's
// process may be another one.
func (a *Announcer) Connected(uid string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.agents[uid] == nil {
		a.agents[uid] = &agent{}
	}
	a.agents[uid].term = 0
	a.announce(uid)
}

// Gone removes an agent whose Pod was removed.
func (a *Announcer) Gone(uid string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.agents, uid)
}

// Announced reports whether an agent knows the current term of this process. It is always true for an allocator that runs
// alone.
func (a *Announcer) Announced(uid string) bool {
	state, _ := a.config.Lead.State()
	if state.Leads && state.Term == 0 {
		return true
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	known := a.agents[uid]
	return state.Leads && known != nil && known.term == state.Term
}

// Run announces each new term to all agents, until ctx ends.
func (a *Announcer) Run(ctx context.Context) error {
	for {
		_, changed := a.config.Lead.State()
		a.mu.Lock()
		for uid := range a.agents {
			a.announce(uid)
		}
		a.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// announce announces the term to one agent in the background, unless the agent knows it. mu is held.
func (a *Announcer) announce(uid string) {
	known := a.agents[uid]
	if term := a.config.Lead.Term(); term == 0 || known.term == term || known.busy {
		return
	}
	known.busy = true
	a.config.Tasks.Go(func(ctx context.Context) { a.run(ctx, uid) })
}

// run repeats the announcement until the agent knows the current term, or there is no term to announce.
func (a *Announcer) run(ctx context.Context, uid string) {
	delays := backoff.New(a.config.Clock, backoff.Policy{Initial: 20 * time.Millisecond, Max: time.Second})
	for {
		err := a.once(ctx, uid)
		if a.finished(uid) {
			return
		}
		if err == nil {
			continue
		}
		logr.FromContextOrDiscard(ctx).V(2).Info("retrying leader announcement", obs.KeyAgentUID, uid, obs.KeyError, err.Error())
		if delays.Wait(ctx) != nil {
			return
		}
	}
}

// once makes one call. The call may carry a higher term than the one that is recorded; then it is repeated.
func (a *Announcer) once(ctx context.Context, uid string) error {
	term := a.config.Lead.Term()
	client, ok := a.config.Client(uid)
	if term == 0 || !ok {
		return errNotPossible
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if _, err := client.AnnounceLeader(ctx, &agentv1.AnnounceLeaderRequest{}); err != nil {
		return rpc.FromStatus(err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if known := a.agents[uid]; known != nil {
		known.term = term
	}
	return nil
}

// finished reports whether the announcement has ended: the agent knows the term or is gone, or this process has no term.
func (a *Announcer) finished(uid string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	known := a.agents[uid]
	if known == nil {
		return true
	}
	term := a.config.Lead.Term()
	if term == 0 || known.term == term {
		known.busy = false
		return true
	}
	return false
}

// errNotPossible is returned if no call was made.
var errNotPossible = errors.New("no connection to the agent, or no term to announce")
