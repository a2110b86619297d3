package cmd

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// runDirect reads the output from the agent of a sandbox, with a ticket of the allocator.
func (o *logsOptions) runDirect(ctx context.Context, c *cli, in *sandboxv1.StreamLogsRequest) error {
	cluster, err := o.cluster.open(c)
	if err != nil {
		return err
	}
	tickets := &logTickets{cli: c, ctx: ctx, name: in.GetName()}
	t, err := tickets.get()
	if err != nil {
		return err
	}
	request := &agentv1.StreamLogsRequest{
		Fence:  &agentv1.Fence{SandboxUid: t.GetSandboxUid(), Attempt: t.GetAttempt(), AgentUid: t.GetAgentUid()},
		Follow: in.GetFollow(), TailLines: in.TailLines, Since: in.GetSince(),
	}
	pod := tunnel.Pod{Namespace: in.GetNamespace(), Name: t.GetAgentPod(), Node: t.GetNodeName(), Ports: map[string]int32{agentPort: t.GetPort()}}
	agent := remote{name: "agent " + pod.Name, role: rpc.RoleAgent, agentUID: t.GetAgentUid(), port: agentPort, ticket: tickets.text}
	return c.at(ctx, cluster, pod, agent, func(ctx context.Context, c *cli, conn *grpc.ClientConn) error {
		client := agentv1.NewAgentServiceClient(conn)
		return copyLogs(ctx, c, in, func(ctx context.Context) (func() ([]byte, error), error) {
			stream, err := client.StreamLogs(ctx, request)
			return pieces(stream), err
		})
	})
}

// logTickets has the ticket for the output of a sandbox. A stream that is opened again later needs another one.
type logTickets struct {
	cli  *cli
	ctx  context.Context //nolint:containedctx // gRPC asks for credentials without the context of the command
	name string

	mu   sync.Mutex
	last *sandboxv1.CreateLogTicketResponse
}

// renewBefore is how long before its end a ticket is not used any longer.
const renewBefore = 10 * time.Second

func (l *logTickets) get() (*sandboxv1.CreateLogTicketResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.last != nil && l.cli.Clock.Now().Add(renewBefore).Before(l.last.GetExpireTime().AsTime()) {
		return l.last, nil
	}
	client, err := l.cli.sandboxes()
	if err != nil {
		return nil, err
	}
	t, err := call(l.ctx, l.cli, "asking for a ticket", func(ctx context.Context) (*sandboxv1.CreateLogTicketResponse, error) {
		return client.CreateLogTicket(ctx, &sandboxv1.CreateLogTicketRequest{Namespace: l.cli.settings.Namespace, Name: l.name})
	})
	if err == nil {
		l.last = t
	}
	return t, err
}

func (l *logTickets) text() (string, error) {
	t, err := l.get()
	return t.GetTicket(), err
}
