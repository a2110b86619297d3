package cmd_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/cmd"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/kinds"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
)

// janitor is a scriptable janitor.
type janitor struct {
	janitorv1.UnimplementedJanitorServiceServer

	verdicts []*janitorv1.Verdict
	events   []*janitorv1.WatchVerdictsResponse
	hold     bool // a watch continues when all events are sent
	results  []*janitorv1.SweepResponse
	err      error // of each call, after its messages

	mu     sync.Mutex
	lists  []*janitorv1.ListVerdictsRequest
	sweeps []*janitorv1.SweepRequest
}

func (j *janitor) ListVerdicts(_ context.Context, in *janitorv1.ListVerdictsRequest) (*janitorv1.ListVerdictsResponse, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lists = append(j.lists, in)
	return &janitorv1.ListVerdictsResponse{Verdicts: j.verdicts}, j.err
}

func (j *janitor) WatchVerdicts(_ *janitorv1.WatchVerdictsRequest, stream janitorv1.JanitorService_WatchVerdictsServer) error {
	for _, e := range j.events {
		if err := stream.Send(e); err != nil {
			return err
		}
	}
	if j.hold {
		<-stream.Context().Done()
	}
	return j.err
}

func (j *janitor) Sweep(in *janitorv1.SweepRequest, stream janitorv1.JanitorService_SweepServer) error {
	j.mu.Lock()
	j.sweeps = append(j.sweeps, in)
	j.mu.Unlock()
	for _, r := range j.results {
		if err := stream.Send(r); err != nil {
			return err
		}
	}
	return j.err
}

// nodes are the janitors of a fake cluster.
type nodes struct {
	addresses map[string]string // of janitors, by node
	names     []string          // in their order
	err       error             // of finding them
	refuse    map[string]error  // errors of connections, by node
	portless  bool
	broken    int // number of tunnels that break at once

	mu        sync.Mutex
	options   tunnel.Options
	selectors []tunnel.Selector
	dials     int
}

func (n *nodes) Pods(_ context.Context, s tunnel.Selector) ([]tunnel.Pod, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.selectors = append(n.selectors, s)
	if n.err != nil {
		return nil, n.err
	}
	var out []tunnel.Pod
	for _, name := range n.names {
		if s.Node != "" && s.Node != name {
			continue
		}
		p := tunnel.Pod{Namespace: s.Namespace, Name: "janitor-" + name, Node: name, Ports: map[string]int32{"grpc": 9090}}
		if n.portless {
			p.Ports = nil
		}
		out = append(out, p)
	}
	return out, nil
}

func (n *nodes) Kinds(context.Context) (kinds.List, error) { return nil, errNotAsked }

func (n *nodes) Names(context.Context, kinds.Kind, string) ([]string, error) { return nil, errNotAsked }

// errNotAsked is the error of calls that no command about janitors makes.
var errNotAsked = errors.New("unexpected call")

func (n *nodes) Sandbox(context.Context, string, string) (*v1alpha1.Sandbox, error) {
	return nil, errNotAsked
}

func (n *nodes) Dial(ctx context.Context, p tunnel.Pod, port int32) (net.Conn, error) {
	n.mu.Lock()
	n.dials++
	err, broken := n.refuse[p.Node], n.dials <= n.broken
	n.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if port != 9090 {
		return nil, fmt.Errorf("connection refused: port %d", port)
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", n.addresses[p.Node])
	if err == nil && broken {
		err = conn.Close()
	}
	return conn, err
}

// withJanitors returns a harness whose cluster has these janitors, by node.
func withJanitors(t *testing.T, byNode map[string]*janitor, names ...string) (*harness, *nodes) {
	t.Helper()
	b := start(t, &fake{})
	n := &nodes{names: names, addresses: map[string]string{}, refuse: map[string]error{}}
	for name, j := range byNode {
		n.addresses[name] = serveJanitor(t, b, j)
	}
	b.cluster = func(o tunnel.Options) (cmd.Cluster, error) {
		n.options = o
		return n, nil
	}
	return b, n
}

func serveJanitor(t *testing.T, b *harness, j *janitor) string {
	t.Helper()
	ctx, cancel := context.WithCancel(logr.NewContext(context.Background(), logr.Discard()))
	s, err := rpc.NewServer(ctx, rpc.ServerConfig{
		Address: "127.0.0.1:0", TLS: b.authority.TLS(t, rpc.RoleJanitor), DrainTimeout: 10 * time.Millisecond,
		Users: users.Open(&janitorv1.JanitorService_ServiceDesc),
	})
	require.NoError(t, err)
	janitorv1.RegisterJanitorServiceServer(s, j)
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	return s.Addr().String()
}

func verdictOn(node, id string, action janitorv1.Action, reason janitorv1.Reason) *janitorv1.Verdict {
	return &janitorv1.Verdict{
		NodeName: node, ContainerId: id, Action: action, Reason: reason, Time: timestamppb.New(now),
		Evidence: &janitorv1.Verdict_Observation{Observation: &janitorv1.Observation{
			Managed: true, State: janitorv1.ContainerState_CONTAINER_STATE_RUNNING, Age: durationpb.New(5 * time.Minute),
			Agent:    janitorv1.AgentState_AGENT_STATE_ALIVE,
			Identity: &janitorv1.ContainerIdentity{Namespace: "default", Name: "web", SandboxUid: "u", Attempt: 1, AgentUid: "a", Pool: "default", Persisted: true},
			Resource: &janitorv1.Resource{State: janitorv1.ResourceState_RESOURCE_STATE_PRESENT}, Fence: janitorv1.FenceOutcome_FENCE_OUTCOME_MATCH,
		}},
	}
}

func kept(node, id string) *janitorv1.Verdict {
	return verdictOn(node, id, janitorv1.Action_ACTION_KEEP, janitorv1.Reason_REASON_ASSIGNED)
}

// orphan returns the verdict on a container whose custom resource no longer exists.
func orphan(node, id string) *janitorv1.Verdict {
	v := verdictOn(node, id, janitorv1.Action_ACTION_DELETE, janitorv1.Reason_REASON_SANDBOX_ABSENT)
	o := v.GetObservation()
	o.Resource.State, o.Fence = janitorv1.ResourceState_RESOURCE_STATE_ABSENT, janitorv1.FenceOutcome_FENCE_OUTCOME_UNSPECIFIED
	o.Missing = durationpb.New(42 * time.Second)
	return v
}

func remnant(node, id string) *janitorv1.Verdict {
	v := verdictOn(node, id, janitorv1.Action_ACTION_DELETE, janitorv1.Reason_REASON_LEFTOVER)
	v.Evidence = &janitorv1.Verdict_Remnant{Remnant: &janitorv1.Remnant{
		Kind: janitorv1.RemnantKind_REMNANT_KIND_SNAPSHOT, Since: durationpb.New(2 * time.Hour),
	}}
	return v
}

func slotOn(node, id string) *janitorv1.Verdict {
	v := verdictOn(node, id, janitorv1.Action_ACTION_KEEP, janitorv1.Reason_REASON_SLOT_OF_AGENT)
	o := v.GetObservation()
	o.Identity, o.Resource, o.Fence = &janitorv1.ContainerIdentity{AgentUid: "a", Pool: "default", Slot: true}, nil, 0
	return v
}

func swept(o janitorv1.SweepResponse_Outcome, v *janitorv1.Verdict, message string) *janitorv1.SweepResponse {
	return &janitorv1.SweepResponse{Outcome: o, Verdict: v, Message: message}
}

// away returns the error of a tunnel to an API server or a Pod that cannot be reached.
func away(reason fault.Reason) error { return fault.New(errdefs.ErrUnavailable, reason, "it is away") }
