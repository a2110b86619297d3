// Package announce makes a leader known to agents. An agent refuses whoever led before from the moment on at which it has
// heard of the new term; until then a former leader may still act on it, and what it reports may be about to change. So a
// leader concludes nothing from an agent's reports before Announced says true. All methods may be called concurrently.
package announce

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
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
	term int64 // that it was told of by this connection; 0 for none
	busy bool  // it is being told
}

// Announcer tells agents.
type Announcer struct {
	config Config

	mu     sync.Mutex
	agents map[string]*agent
}

// New returns an announcer that knows no agents. Its calls run in cfg.Tasks.
func New(cfg Config) *Announcer { return &Announcer{config: cfg, agents: map[string]*agent{}} }

// Connected tells of an agent whose status stream has begun; it is told again who leads, for it may be another process than
// before.
func (a *Announcer) Connected(uid string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.agents[uid] == nil {
		a.agents[uid] = &agent{}
	}
	a.agents[uid].term = 0
	a.tell(uid)
}

// Gone forgets an agent whose Pod is gone.
func (a *Announcer) Gone(uid string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.agents, uid)
}

// Announced tells whether an agent knows the term under which this process leads now. An allocator that runs alone has
// nothing to announce.
func (a *Announcer) Announced(uid string) bool {
	state, _ := a.config.Lead.State()
	if state.Leads && state.Term == 0 {
		return true
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	there := a.agents[uid]
	return state.Leads && there != nil && there.term == state.Term
}

// Run tells all agents whenever the term grows, until ctx ends.
func (a *Announcer) Run(ctx context.Context) error {
	for {
		_, changed := a.config.Lead.State()
		a.mu.Lock()
		for uid := range a.agents {
			a.tell(uid)
		}
		a.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// tell has one agent told in the background, if there is something to tell. The lock is held.
func (a *Announcer) tell(uid string) {
	there := a.agents[uid]
	if term := a.config.Lead.Term(); term == 0 || there.term == term || there.busy {
		return
	}
	there.busy = true
	a.config.Tasks.Go(func(ctx context.Context) { a.run(ctx, uid) })
}

// run tells one agent until it knows the term of the moment, or there is none to tell.
func (a *Announcer) run(ctx context.Context, uid string) {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 20*time.Millisecond, time.Second
	for {
		err := a.once(ctx, uid)
		if a.settled(uid) {
			return
		}
		if err == nil {
			continue
		}
		logr.FromContextOrDiscard(ctx).V(2).Info("announcing the leader again", "agentUID", uid, "err", err.Error())
		timer := a.config.Clock.NewTimer(wait.NextBackOff())
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C():
		}
	}
}

// once tells one agent. The call may carry a higher term than the one that is noted; then it is told once more.
func (a *Announcer) once(ctx context.Context, uid string) error {
	term := a.config.Lead.Term()
	client, ok := a.config.Client(uid)
	if term == 0 || !ok {
		return errNothing
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if _, err := client.AnnounceLeader(ctx, &agentv1.AnnounceLeaderRequest{}); err != nil {
		return rpc.FromStatus(err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if there := a.agents[uid]; there != nil {
		there.term = term
	}
	return nil
}

// settled ends the telling of an agent that knows all, or is gone, or while nobody is to be announced.
func (a *Announcer) settled(uid string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	there := a.agents[uid]
	if there == nil {
		return true
	}
	term := a.config.Lead.Term()
	if term == 0 || there.term == term {
		there.busy = false
		return true
	}
	return false
}

// errNothing is why a call was not made.
var errNothing = errors.New("no connection to the agent, or no term to announce")
