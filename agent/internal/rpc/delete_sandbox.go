package rpc

import (
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// DeleteSandbox deletes a sandbox and sends each stage. The deletion continues when the caller leaves.
func (s *Service) DeleteSandbox(req *agentv1.DeleteSandboxRequest, stream grpc.ServerStreamingServer[agentv1.DeleteSandboxResponse]) error {
	ctx := stream.Context()
	if !trace.SpanContextFromContext(ctx).IsValid() {
		ctx = obs.WithTraceparent(ctx, req.GetTombstone().GetTraceparent())
	}
	trace.SpanFromContext(ctx).SetAttributes(fenceAttributes(req.GetFence())...)
	var sendErr error
	send := func(m *agentv1.DeleteSandboxResponse) {
		if sendErr == nil {
			sendErr = stream.Send(m)
		}
	}
	code, err := s.config.Sandboxes.Delete(ctx, req, func(stage agentv1.DeleteStage) {
		if stage != agentv1.DeleteStage_DELETE_STAGE_REMOVED {
			send(&agentv1.DeleteSandboxResponse{Stage: stage})
		}
	})
	if err != nil {
		return err
	}
	send(&agentv1.DeleteSandboxResponse{Stage: agentv1.DeleteStage_DELETE_STAGE_REMOVED, ExitCode: code})
	return sendErr
}
