// Package usage serves UsageService: a call about one sandbox goes to the agent that runs it, and a list to all agents that have sandboxes. It keeps
// no state. All methods may be called concurrently.
package usage

import (
	"cmp"
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// atOnce is how many agents one list asks at a time.
	atOnce = 32
	// agentTimeout is the default of Config.Timeout.
	agentTimeout = 5 * time.Second
)

// Config is what a Service needs.
type Config struct {
	// Sandboxes passes calls on to the agents of the sandboxes that they name.
	Sandboxes usagev1.UsageServiceClient
	// Agents says which agents there are.
	Agents allocatorv1.AllocatorServiceClient
	// Connect returns a connection to an agent, whose use ends with done. It does no I/O.
	Connect func(address, agentUID string) (conn grpc.ClientConnInterface, done func(), err error)
	// Draining is closed when the process stops: streams end with an error that asks the caller to connect again.
	Draining <-chan struct{}
	// Timeout is how long an agent may take for its part of a list. Zero: 5 s.
	Timeout time.Duration
}

// Service implements UsageService. Make it with New.
type Service struct {
	usagev1.UnimplementedUsageServiceServer

	config Config
}

// New returns a Service.
func New(cfg Config) *Service {
	cfg.Timeout = cmp.Or(cfg.Timeout, agentTimeout)
	return &Service{config: cfg}
}

// GetSandboxUsage implements usagev1.UsageServiceServer.
func (s *Service) GetSandboxUsage(ctx context.Context, req *usagev1.GetSandboxUsageRequest) (*usagev1.GetSandboxUsageResponse, error) {
	resp, err := s.config.Sandboxes.GetSandboxUsage(ctx, req)
	return resp, rpc.FromStatus(err)
}

// WatchSandboxUsage implements usagev1.UsageServiceServer.
func (s *Service) WatchSandboxUsage(req *usagev1.WatchSandboxUsageRequest, to grpc.ServerStreamingServer[usagev1.WatchSandboxUsageResponse]) error {
	return s.untilDraining(to.Context(), func(ctx context.Context) error {
		from, err := s.config.Sandboxes.WatchSandboxUsage(ctx, req)
		if err != nil {
			return err
		}
		return each(from, to.Send)
	})
}

// untilDraining executes a part of a stream. Its context ends when the process stops.
func (s *Service) untilDraining(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() {
		select {
		case <-s.config.Draining:
			cancel(errDraining)
		case <-ctx.Done():
		}
	})
	err := do(ctx)
	if err != nil && errors.Is(context.Cause(ctx), errDraining) {
		return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the gateway is stopping; connect again")
	}
	return rpc.FromStatus(err)
}

var errDraining = errors.New("draining")

// each passes the messages of a stream to send until it ends.
func each[T any](from grpc.ServerStreamingClient[T], send func(*T) error) error {
	for {
		m, err := from.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if err := send(m); err != nil {
			return err
		}
	}
}

// ListSandboxUsage implements usagev1.UsageServiceServer.
func (s *Service) ListSandboxUsage(req *usagev1.ListSandboxUsageRequest, to grpc.ServerStreamingServer[usagev1.ListSandboxUsageResponse]) error {
	return s.untilDraining(to.Context(), func(ctx context.Context) error { return s.list(ctx, req, to.Send) })
}

// list asks the agents that have sandboxes, and reports those that do not answer. The error is that of the allocator, or of send.
func (s *Service) list(ctx context.Context, req *usagev1.ListSandboxUsageRequest, send func(*usagev1.ListSandboxUsageResponse) error) error {
	resp, err := s.config.Agents.ListAgents(ctx, &allocatorv1.ListAgentsRequest{Namespace: req.GetNamespace(), Pool: req.GetPool()})
	if err != nil {
		return err
	}
	var mu sync.Mutex // of send
	sendOne := func(m *usagev1.ListSandboxUsageResponse) error {
		mu.Lock()
		defer mu.Unlock()
		return send(m)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for _, a := range resp.GetAgents() {
		if a.GetAllocated() == 0 {
			continue
		}
		group.Go(func() error {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return s.ask(ctx, a, req, sendOne)
		})
	}
	return group.Wait()
}

// ask sends what one agent answers, or why it does not. The error is that of send, or the end of the call.
func (s *Service) ask(ctx context.Context, a *allocatorv1.Agent, req *usagev1.ListSandboxUsageRequest, send func(*usagev1.ListSandboxUsageResponse) error) error {
	var broken error
	limited, cancel := context.WithTimeout(ctx, s.config.Timeout)
	defer cancel()
	err := func() error {
		conn, done, err := s.config.Connect(a.GetAddress(), a.GetInfo().GetPodUid())
		if err != nil {
			return err
		}
		defer done()
		from, err := usagev1.NewUsageServiceClient(conn).ListSandboxUsage(rpc.ForCaller(limited), req)
		if err != nil {
			return err
		}
		return each(from, func(m *usagev1.ListSandboxUsageResponse) error {
			broken = send(own(m, a))
			return broken
		})
	}()
	switch {
	case broken != nil:
		return broken
	case ctx.Err() != nil:
		return ctx.Err()
	case err == nil:
		return nil
	}
	text := reason(err)
	if code := status.Code(err); limited.Err() != nil || code == codes.Canceled || code == codes.DeadlineExceeded { // the agent's clock may be first
		text = "the agent did not answer within " + s.config.Timeout.String()
	}
	return send(&usagev1.ListSandboxUsageResponse{AgentPod: a.GetInfo().GetPodName(), NodeName: a.GetInfo().GetNodeName(), Error: text})
}

// own returns an answer of an agent with what counts of it: an agent reports for its own Pod, namespace and pool alone.
func own(m *usagev1.ListSandboxUsageResponse, a *allocatorv1.Agent) *usagev1.ListSandboxUsageResponse {
	m.AgentPod, m.NodeName = a.GetInfo().GetPodName(), a.GetInfo().GetNodeName()
	for _, s := range m.GetSandboxes() {
		s.Namespace, s.Pool = a.GetInfo().GetNamespace(), a.GetInfo().GetPool()
	}
	return m
}

// reason returns the text of an error for people: that of an agent's own error, and nothing of the connection's.
func reason(err error) string {
	if known := rpc.FromStatus(err); fault.ReasonOf(known) != "" {
		return known.Error()
	}
	return "the agent cannot be reached"
}
