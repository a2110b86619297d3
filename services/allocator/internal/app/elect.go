package app

import (
	"context"
	"fmt"
	"net/http"
	"time"

	coordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/announce"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/leadership"
)

// leaseName is the name of the allocators' Lease.
const leaseName = "fast-sandbox-allocator"

// elect makes the part in the election, if this allocator takes part in one.
func (a *App) elect(p *parts, httpClient *http.Client) error {
	if !a.config.LeaderElect {
		p.lead = leadership.Alone()
		return nil
	}
	address, err := a.config.advertise(a.config.BindAddress)
	if err != nil {
		return fmt.Errorf("finding this replica's address: %w", err)
	}
	client, err := coordinationv1.NewForConfigAndClient(a.rest, httpClient)
	if err != nil {
		return fmt.Errorf("making the client of the Lease: %w", err)
	}
	identity := leadership.NewIdentity(a.config.PodName, address)
	p.elector = leader.New(leader.Config{
		Leases: client, Namespace: a.config.Namespace, Name: leaseName, Identity: identity.String(),
		Timing: a.config.Lease,
	})
	p.lead = leadership.New(p.elector, identity)
	return nil
}

// settlePatience is how long agents are waited for before a process that has just started stands for election.
const settlePatience = 2 * time.Second

// campaign takes part in the election once this process could do a leader's work: a cold one must not win it from one that
// is warm. When ctx ends the Lease is given up last of all.
func (a *App) campaign(ctx context.Context, p *parts) error {
	select {
	case <-ctx.Done():
		return nil
	case <-p.synced:
	}
	ticker := a.clock.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for !p.fleet.AllReported(settlePatience) {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
	}
	return after(ctx, p.drain, p.elector.Run)
}

// sink has the announcer hear of agents, too.
type sink struct {
	*fleet.Fleet
	announce *announce.Announcer
}

// Snapshot implements feed.Sink.
func (s sink) Snapshot(uid string, snapshot *agentv1.AgentSnapshot) {
	s.Fleet.Snapshot(uid, snapshot)
	s.announce.Connected(uid)
}

// Left implements feed.Sink.
func (s sink) Left(uid string) {
	s.announce.Gone(uid)
	s.Fleet.Left(uid)
}
