package rpc

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// CreateSandbox creates a sandbox and sends each stage.
func (s *Service) CreateSandbox(req *agentv1.CreateSandboxRequest, stream grpc.ServerStreamingServer[agentv1.CreateSandboxResponse]) error {
	record := req.GetRecord()
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	if !trace.SpanContextFromContext(ctx).IsValid() {
		ctx = obs.WithTraceparent(ctx, record.GetTraceparent())
	}
	trace.SpanFromContext(ctx).SetAttributes(append(fenceAttributes(record.GetFence()),
		attribute.String(obs.AttrSandboxNamespace, record.GetNamespace()), attribute.String(obs.AttrSandboxName, record.GetName()))...)
	var sendErr error
	send := func(m *agentv1.CreateSandboxResponse) {
		// A caller that receives nothing has left.
		if sendErr == nil {
			if sendErr = stream.Send(m); sendErr != nil {
				cancel()
			}
		}
	}
	var started *agentv1.CreateSandboxResponse
	report, err := s.config.Sandboxes.Create(ctx, record, req.GetPersisted(), func(t sandbox.StageTiming) {
		m := &agentv1.CreateSandboxResponse{Stage: t.Stage, Duration: duration(t.Duration)}
		if t.Stage == agentv1.CreateStage_CREATE_STAGE_STARTED {
			started = m // it goes last, with the report
			return
		}
		send(m)
	})
	if err != nil {
		return err
	}
	if started == nil { // the sandbox exists since an earlier agent process
		started = &agentv1.CreateSandboxResponse{Stage: agentv1.CreateStage_CREATE_STAGE_STARTED}
	}
	started.Report = report
	send(started)
	return sendErr
}
