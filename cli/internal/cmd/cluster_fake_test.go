package cmd_test

import (
	"context"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/cmd"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/kinds"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
)

// agentCluster is a fake cluster with custom resources and one agent.
type agentCluster struct {
	sandboxes map[string]*v1alpha1.Sandbox // by namespace/name
	agent     string                       // address of the agent
	err       error                        // of Dial
	options   tunnel.Options
	pods      []tunnel.Pod // Pods that were connected to
	ports     []int32
}

func (a *agentCluster) Pods(context.Context, tunnel.Selector) ([]tunnel.Pod, error) {
	return nil, errNotAsked
}

func (a *agentCluster) Dial(ctx context.Context, p tunnel.Pod, port int32) (net.Conn, error) {
	if a.err != nil {
		return nil, a.err
	}
	a.pods, a.ports = append(a.pods, p), append(a.ports, port)
	var d net.Dialer
	return d.DialContext(ctx, "tcp", a.agent)
}

func (a *agentCluster) Sandbox(_ context.Context, namespace, name string) (*v1alpha1.Sandbox, error) {
	if s := a.sandboxes[namespace+"/"+name]; s != nil {
		return s, nil
	}
	return nil, fault.New(errdefs.ErrNotFound, tunnel.ReasonCluster, "getting sandbox %s: not found", name)
}

func (a *agentCluster) Kinds(context.Context) (kinds.List, error) { return nil, errNotAsked }

func (a *agentCluster) Names(context.Context, kinds.Kind, string) ([]string, error) {
	return nil, errNotAsked
}

// resource returns a custom resource with the annotations.
func resource(name string, annotations map[string]string) *v1alpha1.Sandbox {
	return &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Annotations: annotations}}
}

// withResources returns a harness whose allocator is down and whose cluster has these custom resources.
func withResources(t *testing.T, all ...*v1alpha1.Sandbox) (*harness, *agentCluster) {
	t.Helper()
	b := start(t, &fake{})
	b.stop()
	n := &agentCluster{sandboxes: map[string]*v1alpha1.Sandbox{}}
	for _, s := range all {
		n.sandboxes[s.Namespace+"/"+s.Name] = s
	}
	b.cluster = func(o tunnel.Options) (cmd.Cluster, error) {
		n.options = o
		return n, nil
	}
	return b, n
}

// withAgent returns a harness whose allocator gives tickets for sandbox web, and a cluster for its agent.
func withAgent(t *testing.T) (*harness, *agentCluster) {
	t.Helper()
	issued := 0
	b := start(t, &fake{ticket: func(_ context.Context, in *sandboxv1.CreateLogTicketRequest) (*sandboxv1.CreateLogTicketResponse, error) {
		if in.GetNamespace() != "default" || in.GetName() != "web" {
			return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "sandbox %s/%s does not exist", in.GetNamespace(), in.GetName())
		}
		issued++
		return &sandboxv1.CreateLogTicketResponse{
			Ticket: "ticket-" + strconv.Itoa(issued), ExpireTime: timestamppb.New(now.Add(time.Minute)),
			SandboxUid: "sandbox-uid", Attempt: 3, AgentUid: "agent-uid", AgentPod: "agent-1", NodeName: "node-1", Port: 5758,
		}, nil
	}})
	n := &agentCluster{}
	b.cluster = func(o tunnel.Options) (cmd.Cluster, error) {
		n.options = o
		return n, nil
	}
	return b, n
}

// logsAgent is an agent that serves logs.
type logsAgent struct {
	agentv1.UnimplementedAgentServiceServer
	logs func(*agentv1.StreamLogsRequest, agentv1.AgentService_StreamLogsServer) error
}

func (a *logsAgent) StreamLogs(in *agentv1.StreamLogsRequest, s agentv1.AgentService_StreamLogsServer) error {
	return a.logs(in, s)
}

// serveAgent runs an agent with a certificate of the role, which takes the tickets of withAgent, and returns its address.
func serveAgent(t *testing.T, b *harness, role rpc.Role, a *logsAgent) string {
	t.Helper()
	ctx, cancel := context.WithCancel(logr.NewContext(context.Background(), logr.Discard()))
	open := users.Open(&agentv1.AgentService_ServiceDesc)
	open.Tokens = users.Tokens{"ticket-1": {User: "ticket-1"}, "ticket-2": {User: "ticket-2"}}
	files := b.authority.TLS(t, role)
	if role == rpc.RoleAgent {
		files = b.authority.Agent(t, rpc.AgentID{Namespace: "default", Pod: "agent-1", UID: "agent-uid"})
	}
	s, err := rpc.NewServer(ctx, rpc.ServerConfig{
		Address: "127.0.0.1:0", TLS: files, DrainTimeout: 10 * time.Millisecond, Users: open,
	})
	require.NoError(t, err)
	agentv1.RegisterAgentServiceServer(s, a)
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	return s.Addr().String()
}
