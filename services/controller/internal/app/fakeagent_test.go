//go:build integration

package app_test

import (
	"context"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
)

// agent is a fake agent behind a service that records calls and can fail or block them. The fields below mu script it.
type agent struct {
	agentv1.AgentServiceServer // the fake agent's

	fake     *fakeagent.Agent
	info     *agentv1.AgentInfo
	address  string
	registry *allocator
	stop     func()

	mu          sync.Mutex
	draining    bool
	cannotDrain bool // a version without Drain
	creates     []*agentv1.CreateSandboxRequest
	pins        []*agentv1.SetPinnedImagesRequest
	// pinErr and createErr, while they are not nil, are the results of SetPinnedImages and CreateSandbox.
	pinErr, createErr error
	// answerGate blocks creates before their first response, gate after it, and deleteGate deletes, until they are closed.
	answerGate, gate, deleteGate chan struct{}
	// unreported keeps the agent's sandboxes from the Registry.
	unreported bool
}

func idOf(f *agentv1.Fence) string { return identity.FenceOf(f).ContainerID() }

// startAgent starts an agent that reports to a Registry.
func startAgent(t *testing.T, info *agentv1.AgentInfo, registry *allocator) *agent {
	t.Helper()
	info.PodIp = "10.0.0.9"
	a := &agent{info: info, registry: registry, fake: fakeagent.New(info)}
	a.fake.SetSlots(&agentv1.SlotStatus{Free: 1000})
	a.fake.Wrap = func(s agentv1.AgentServiceServer) agentv1.AgentServiceServer { a.AgentServiceServer = s; return a }
	a.fake.OnCreate = func(ctx context.Context, _ *agentv1.SandboxRecord) error {
		return a.wait(ctx, func() chan struct{} { return a.gate })
	}
	a.fake.OnDelete = func(ctx context.Context, _ *agentv1.Fence) error {
		return a.wait(ctx, func() chan struct{} { return a.deleteGate })
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	a.address = listener.Addr().String()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() { _ = a.fake.Serve(ctx, listener, rpc.TLS{Insecure: true}) })
	conn, err := rpc.Dial(a.address, rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}})
	require.NoError(t, err)
	stream, err := agentv1.NewAgentServiceClient(conn).WatchStatus(ctx, &agentv1.WatchStatusRequest{})
	require.NoError(t, err)
	_, err = stream.Recv() // the snapshot of an agent without sandboxes
	require.NoError(t, err)
	running.Go(func() { a.follow(stream) })
	a.stop = sync.OnceFunc(func() { cancel(); _ = conn.Close(); running.Wait() })
	t.Cleanup(a.stop)
	return a
}

// follow forwards the changes of a status stream to the Registry until the stream ends.
func (a *agent) follow(stream grpc.ServerStreamingClient[agentv1.WatchStatusResponse]) {
	for {
		m, err := stream.Recv()
		if err != nil {
			return
		}
		d := m.GetDelta()
		if d != nil && d.Accepting != nil {
			a.registry.setAccepting(a, !d.GetAccepting())
		}
		a.mu.Lock()
		unreported := a.unreported
		a.mu.Unlock()
		if reports := d.GetSandboxes(); len(reports) > 0 && !unreported {
			a.registry.changed(a, reports)
		}
	}
}

// wait waits until the gate, if there is one, is closed.
func (a *agent) wait(ctx context.Context, which func() chan struct{}) error {
	a.mu.Lock()
	gate := which()
	a.mu.Unlock()
	if gate == nil {
		return nil
	}
	select {
	case <-gate:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// CreateSandbox implements agentv1.AgentServiceServer.
func (a *agent) CreateSandbox(req *agentv1.CreateSandboxRequest, s grpc.ServerStreamingServer[agentv1.CreateSandboxResponse]) error {
	a.mu.Lock()
	a.creates = append(a.creates, req)
	err := a.createErr
	a.mu.Unlock()
	if err != nil {
		return err
	}
	if err := a.wait(s.Context(), func() chan struct{} { return a.answerGate }); err != nil {
		return err
	}
	return a.AgentServiceServer.CreateSandbox(req, s)
}

// Drain implements agentv1.AgentServiceServer.
func (a *agent) Drain(ctx context.Context, req *agentv1.DrainRequest) (*agentv1.DrainResponse, error) {
	a.mu.Lock()
	cannot := a.cannotDrain
	a.mu.Unlock()
	if cannot {
		return nil, status.Error(codes.Unimplemented, "method Drain not implemented")
	}
	resp, err := a.AgentServiceServer.Drain(ctx, req)
	if err == nil {
		a.set(func(a *agent) { a.draining = !req.GetResume() })
	}
	return resp, err
}

// SetPinnedImages implements agentv1.AgentServiceServer.
func (a *agent) SetPinnedImages(ctx context.Context, req *agentv1.SetPinnedImagesRequest) (*agentv1.SetPinnedImagesResponse, error) {
	a.mu.Lock()
	a.pins = append(a.pins, req)
	err := a.pinErr
	a.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return a.AgentServiceServer.SetPinnedImages(ctx, req)
}

func (a *agent) all() []*agentv1.SandboxReport { return a.fake.Sandboxes() }

// put adds a sandbox, as a create on the fast path does, or changes one.
func (a *agent) put(r *agentv1.SandboxReport) { a.fake.Put(r) }

// removeContainer removes a container that was not deleted.
func (a *agent) removeContainer(id string) {
	for _, r := range a.all() {
		if r.GetContainerId() == id {
			a.put(&agentv1.SandboxReport{Record: r.GetRecord(), ContainerId: id, State: stateTerminated})
		}
	}
}

func (a *agent) set(change func(*agent)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change(a)
}

func (a *agent) createCalls() []*agentv1.CreateSandboxRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.creates)
}

func (a *agent) isDraining() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.draining
}

// The controllers of the tests have no certificates, and therefore no role.
func (a *agent) seenTerm() int64    { return a.fake.Term("") }
func (a *agent) raiseTerm(to int64) { a.fake.SetTerm("", to) }

// gracePeriods returns the grace periods of all delete calls, without those that repeat the one before: a controller that has not
// yet seen the answer in the agent's status calls again. A call without one is -1.
func (a *agent) gracePeriods() []time.Duration {
	var out []time.Duration
	for _, d := range a.fake.DeleteRequests() {
		if d.GetGracePeriod() == nil {
			out = append(out, -1)
			continue
		}
		out = append(out, d.GetGracePeriod().AsDuration())
	}
	return slices.Compact(out)
}

func (a *agent) pinCalls() []*agentv1.SetPinnedImagesRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.pins)
}

func (a *agent) deleteCalls() int { return len(a.fake.DeleteRequests()) }
