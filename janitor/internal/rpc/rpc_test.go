package rpc_test

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
	janitorrpc "github.com/fast-sandbox/fast-sandbox/janitor/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var now = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

// core is a scriptable janitor.
type core struct {
	mu       sync.Mutex
	findings []janitorrpc.Finding
	err      error
	changed  chan struct{}
	results  []janitorrpc.Result
	orders   []janitorrpc.Order
}

func newCore(findings ...janitorrpc.Finding) *core {
	return &core{findings: findings, changed: make(chan struct{})}
}

// set changes what is found.
func (c *core) set(err error, findings ...janitorrpc.Finding) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.findings, c.err = findings, err
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *core) Findings(context.Context) ([]janitorrpc.Finding, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.findings, c.err
}

func (c *core) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// Sweep reports all results that the order selects, by the rules of the real janitor.
func (c *core) Sweep(ctx context.Context, o janitorrpc.Order, report func(janitorrpc.Result) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.orders = append(c.orders, o)
	for _, r := range c.results {
		id := ""
		if r.Finding.Remnant != nil {
			id = r.Finding.Remnant.ContainerID
		} else {
			id = r.Finding.Observation.ContainerID
		}
		if !o.Selects(id, r.Finding.Verdict) && !o.IDs[id] {
			continue
		}
		if err := report(r); err != nil {
			return err
		}
	}
	if c.err != nil {
		return c.err
	}
	return ctx.Err()
}

// serve serves the core over an in-memory network and returns a client of a user.
func serve(t *testing.T, c *core, closing <-chan struct{}) janitorv1.JanitorServiceClient {
	t.Helper()
	return serveAs(t, c, closing)(func(ca *pki.Authority) rpc.TLS { return ca.User(t, "alice") })
}

// serveAs is serve for callers with any certificate.
func serveAs(t *testing.T, c *core, closing <-chan struct{}) func(func(*pki.Authority) rpc.TLS) janitorv1.JanitorServiceClient {
	t.Helper()
	ca, listener := pki.New(t), bufconn.Listen(1<<20)
	server, err := rpc.NewServer(t.Context(), rpc.ServerConfig{
		Listener: listener, TLS: ca.TLS(t, rpc.RoleJanitor), Users: users.Open(&janitorv1.JanitorService_ServiceDesc), DrainTimeout: 10 * time.Millisecond,
	})
	require.NoError(t, err)
	janitorv1.RegisterJanitorServiceServer(server, janitorrpc.New(janitorrpc.Config{Core: c, NodeName: "node-1"}, closing))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	return func(with func(*pki.Authority) rpc.TLS) janitorv1.JanitorServiceClient {
		conn, err := rpc.Dial("passthrough:///janitor", rpc.ClientConfig{
			TLS: with(ca), ServerName: rpc.RoleJanitor.ServerName(),
			Options: []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) })},
		})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, conn.Close()) })
		return janitorv1.NewJanitorServiceClient(conn)
	}
}

// claimed returns a healthy container of a sandbox.
func claimed(id string) *verdict.Observation {
	return &verdict.Observation{
		ContainerID: id, Managed: true, Container: verdict.Running, Age: time.Minute, Agent: verdict.AgentAlive,
		Identity: identity.Identity{
			Namespace: "ns", Name: "sb", SandboxUID: "u-" + id, Attempt: 2, AgentUID: "agent", Pool: "pool", State: identity.StateClaimed, Persisted: true,
		},
		Resource: verdict.Resource{State: verdict.ResourcePresent, UID: "u-" + id, Assignment: &verdict.Assignment{AgentUID: "agent", Attempt: 2}},
	}
}

func judged(o *verdict.Observation) janitorrpc.Finding {
	return janitorrpc.Finding{Observation: o, Verdict: verdict.Decide(*o, policy), Time: now}
}

func left(r *verdict.Remnant) janitorrpc.Finding {
	return janitorrpc.Finding{Remnant: r, Verdict: verdict.DecideRemnant(*r, policy), Time: now}
}

var policy = verdict.Policy{Grace: 10 * time.Second, LeftoverGrace: time.Minute, LogRetention: time.Hour}

// orphan returns a container whose agent is gone.
func orphan(id string) *verdict.Observation {
	o := claimed(id)
	o.Agent = verdict.AgentGone
	return o
}
