package app

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"google.golang.org/grpc"
	coordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/announce"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/leadership"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/liveness"
)

// leaseName is the name of the allocators' Lease.
const leaseName = "fast-sandbox-allocator"

// elect creates the elector, unless this allocator runs alone.
func (a *App) elect(p *parts, httpClient *http.Client) error {
	if !a.config.LeaderElect {
		p.lead = leadership.Alone()
		return nil
	}
	address, err := a.config.advertise(a.config.BindAddress)
	if err != nil {
		return fmt.Errorf("finding the address of this replica: %w", err)
	}
	client, err := coordinationv1.NewForConfigAndClient(a.rest, httpClient)
	if err != nil {
		return fmt.Errorf("creating the Lease client: %w", err)
	}
	identity := leadership.NewIdentity(a.config.PodName, address)
	p.elector = leader.New(leader.Config{
		Leases: client, Namespace: a.config.Namespace, Name: leaseName, Identity: identity.String(),
		Timing: a.config.Lease,
	})
	p.identity = identity
	p.lead = leadership.New(p.elector, identity)
	return nil
}

// reportTimeout is how long a new process waits for the reports of agents before it takes part in the election.
const reportTimeout = 2 * time.Second

// campaign takes part in the election once this process is ready to lead: a cold process must not win against a warm one. Before
// that, it releases the Lease if an earlier run of this process held it when it was killed, so that the warm one leads at once.
// When ctx ends, the Lease is released last.
func (a *App) campaign(ctx context.Context, p *parts) error {
	p.elector.Inherit(ctx, p.identity.Replaces)
	if !a.awaitReports(ctx, p, reportTimeout) {
		return nil
	}
	return after(ctx, p.drain, p.elector.Run)
}

// watchLeader has the elector know while the server of the leader refuses connections, as that of a process that was killed does.
func (a *App) watchLeader(ctx context.Context, p *parts) error {
	return liveness.Run(ctx, liveness.Config{Lead: p.lead, Dial: a.dialReplica, Refused: p.elector.Ended, Clock: a.clock})
}

// dialReplica returns a connection to another allocator.
func (a *App) dialReplica(address string) (*grpc.ClientConn, error) {
	return rpc.Dial(address, rpc.ClientConfig{TLS: a.config.TLS, ServerName: rpc.RoleAllocator.ServerName(), Silence: rpc.DefaultSilence})
}

// sink is a feed.Sink that also notifies the announcer.
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
