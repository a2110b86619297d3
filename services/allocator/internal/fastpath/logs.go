package fastpath

import (
	"context"
	"errors"
	"io"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// container returns the fence of a sandbox that has, or had, a container whose output may exist.
func (s *Server) container(ctx context.Context, key store.Key) (*agentv1.Fence, error) {
	item, err := s.get(ctx, key)
	if err != nil {
		return nil, err
	}
	phase := item.Sandbox.GetStatus().GetPhase()
	if item.Fence == nil || phase == sandboxv1.Phase_PHASE_PENDING || phase == sandboxv1.Phase_PHASE_EXPIRED {
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.PhaseConflict, "sandbox %s has no container in the phase %s", key, phase).
			With("phase", phase.String())
	}
	return item.Fence, nil
}

// StreamLogs implements sandboxv1.SandboxServiceServer. It forwards what the sandbox's agent sends.
func (s *Server) StreamLogs(req *sandboxv1.StreamLogsRequest, stream grpc.ServerStreamingServer[sandboxv1.StreamLogsResponse]) error {
	key := store.Key{Namespace: req.GetNamespace(), Name: req.GetName()}
	fence, err := s.container(stream.Context(), key)
	if err != nil {
		return err
	}
	client, ok := s.config.Agents.Client(fence.GetAgentUid())
	if !ok {
		return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent of sandbox %s is gone", key)
	}
	source, err := client.StreamLogs(stream.Context(), &agentv1.StreamLogsRequest{
		Fence: fence, Follow: req.GetFollow(), TailLines: req.TailLines, Since: req.GetSince(),
	})
	if err != nil {
		return rpc.FromStatus(err)
	}
	// Headers are forwarded as soon as they arrive: the process may write nothing for long. No header and no error is how a
	// refusal looks here; Recv returns it.
	header, err := source.Header()
	if err != nil {
		return rpc.FromStatus(err)
	}
	if header != nil {
		if err := stream.SendHeader(metadata.MD{}); err != nil {
			return err
		}
	}
	for {
		m, err := source.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return rpc.FromStatus(err)
		}
		if err := stream.Send(&sandboxv1.StreamLogsResponse{Data: m.GetData()}); err != nil {
			return err
		}
	}
}
