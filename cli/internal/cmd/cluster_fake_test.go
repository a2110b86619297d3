package cmd_test

import (
	"context"
	"encoding/json"
	"net"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/cmd"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/kinds"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// resources is a fake cluster with custom resources and one agent.
type resources struct {
	sandboxes map[string]*v1alpha1.Sandbox // by namespace/name
	agent     string                       // address of the agent
	err       error                        // of Sandbox
	options   tunnel.Options
	pods      []tunnel.Pod // Pods that were connected to
	ports     []int32
}

func (r *resources) Pods(context.Context, tunnel.Selector) ([]tunnel.Pod, error) {
	return nil, errNotAsked
}

func (r *resources) Dial(ctx context.Context, p tunnel.Pod, port int32) (net.Conn, error) {
	r.pods, r.ports = append(r.pods, p), append(r.ports, port)
	var d net.Dialer
	return d.DialContext(ctx, "tcp", r.agent)
}

func (r *resources) Sandbox(_ context.Context, namespace, name string) (*v1alpha1.Sandbox, error) {
	if r.err != nil {
		return nil, r.err
	}
	if s := r.sandboxes[namespace+"/"+name]; s != nil {
		return s, nil
	}
	return nil, fault.New(errdefs.ErrNotFound, tunnel.ReasonCluster, "getting sandbox %s: not found", name)
}

func (r *resources) Kinds(context.Context) (kinds.List, error) { return nil, errNotAsked }

func (r *resources) Names(context.Context, kinds.Kind, string) ([]string, error) {
	return nil, errNotAsked
}

// resource returns a custom resource with the annotations.
func resource(name string, annotations map[string]string) *v1alpha1.Sandbox {
	return &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Annotations: annotations}}
}

// assigned returns a custom resource that is assigned to the agent of resources.
func assigned(t *testing.T, name string) *v1alpha1.Sandbox {
	t.Helper()
	raw, err := json.Marshal(v1alpha1.Assignment{
		AgentPod: "agent-1", AgentUID: "agent-uid", NodeName: "node-1", AgentAddress: "10.0.0.3:5758", SandboxUID: "sandbox-uid", Attempt: 3,
	})
	require.NoError(t, err)
	return resource(name, map[string]string{v1alpha1.AnnotationAssignment: string(raw)})
}

// withResources returns a harness whose allocator is down and whose cluster has these custom resources.
func withResources(t *testing.T, all ...*v1alpha1.Sandbox) (*harness, *resources) {
	t.Helper()
	b := start(t, &fake{})
	b.stop()
	n := &resources{sandboxes: map[string]*v1alpha1.Sandbox{}}
	for _, s := range all {
		n.sandboxes[s.Namespace+"/"+s.Name] = s
	}
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

// serveAgent runs an agent with a certificate of the role and returns its address.
func serveAgent(t *testing.T, b *harness, role rpc.Role, a *logsAgent) string {
	t.Helper()
	ctx, cancel := context.WithCancel(logr.NewContext(context.Background(), logr.Discard()))
	s, err := rpc.NewServer(ctx, rpc.ServerConfig{
		Address: "127.0.0.1:0", TLS: b.authority.TLS(t, role), DrainTimeout: 10 * time.Millisecond,
		Allow: map[string][]rpc.Role{agentv1.AgentService_StreamLogs_FullMethodName: {rpc.RoleClient}},
	})
	require.NoError(t, err)
	agentv1.RegisterAgentServiceServer(s, a)
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	return s.Addr().String()
}
