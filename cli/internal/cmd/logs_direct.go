package cmd

import (
	"context"
	"fmt"
	"net"
	"strconv"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// runDirect reads the output from the agent that the custom resource is assigned to.
func (o *logsOptions) runDirect(ctx context.Context, c *cli, in *sandboxv1.StreamLogsRequest) error {
	cluster, err := o.cluster.open(c)
	if err != nil {
		return err
	}
	assignment, err := assignmentOf(ctx, c, cluster, in.GetName())
	if err != nil {
		return err
	}
	pod, err := agentPod(in.GetNamespace(), assignment)
	if err != nil {
		return err
	}
	request := &agentv1.StreamLogsRequest{
		Fence:  &agentv1.Fence{SandboxUid: assignment.SandboxUID, Attempt: assignment.Attempt, AgentUid: assignment.AgentUID},
		Follow: in.GetFollow(), TailLines: in.TailLines, Since: in.GetSince(),
	}
	agent := remote{name: "agent " + pod.Name, role: rpc.RoleAgent, port: agentPort}
	return c.at(ctx, cluster, pod, agent, func(ctx context.Context, c *cli, conn *grpc.ClientConn) error {
		client := agentv1.NewAgentServiceClient(conn)
		return copyLogs(ctx, c, in, func(ctx context.Context) (func() ([]byte, error), error) {
			stream, err := client.StreamLogs(ctx, request)
			return pieces(stream), err
		})
	})
}

// assignmentOf returns the assignment of a sandbox, from its custom resource.
func assignmentOf(ctx context.Context, c *cli, cluster Cluster, name string) (*v1alpha1.Assignment, error) {
	s, err := getResource(ctx, c, cluster, name)
	if err != nil {
		return nil, err
	}
	assignment, err := s.Assignment()
	if err != nil {
		return nil, fmt.Errorf("reading the assignment of sandbox %q: %w", name, err)
	}
	if assignment == nil {
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.PhaseConflict, "sandbox %q is not assigned to an agent", name)
	}
	return assignment, nil
}

// getResource returns the custom resource of a sandbox.
func getResource(ctx context.Context, c *cli, cluster Cluster, name string) (*v1alpha1.Sandbox, error) {
	s, err := call(ctx, c, "getting "+name, func(ctx context.Context) (*v1alpha1.Sandbox, error) {
		return cluster.Sandbox(ctx, c.settings.Namespace, name)
	})
	if errdefs.IsNotFound(err) {
		return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no custom resource for sandbox %s/%s", c.settings.Namespace, name)
	}
	return s, err
}

// agentPod returns the Pod of an assignment. Its only port is that of the agent.
func agentPod(namespace string, a *v1alpha1.Assignment) (tunnel.Pod, error) {
	_, text, err := net.SplitHostPort(a.AgentAddress)
	if err != nil {
		return tunnel.Pod{}, fmt.Errorf("reading the address of agent %s: %w", a.AgentPod, err)
	}
	port, err := strconv.ParseInt(text, 10, 32)
	if err != nil {
		return tunnel.Pod{}, fmt.Errorf("reading the address of agent %s: %w", a.AgentPod, err)
	}
	return tunnel.Pod{Namespace: namespace, Name: a.AgentPod, Node: a.NodeName, Ports: map[string]int32{agentPort: int32(port)}}, nil
}
