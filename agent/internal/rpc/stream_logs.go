package rpc

import (
	"bytes"
	"context"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// StreamLogs sends a sandbox's output.
func (s *Service) StreamLogs(req *agentv1.StreamLogsRequest, stream grpc.ServerStreamingServer[agentv1.StreamLogsResponse]) error {
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	id, ended, err := s.config.Sandboxes.Log(ctx, req.GetFence())
	if err != nil {
		return err
	}
	// The header reports at once that the stream is open: a process may write nothing for a long time.
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	stopped := make(chan struct{})
	defer func() { cancel(); <-stopped }()
	go func() {
		defer close(stopped)
		select {
		case <-s.closing:
			cancel()
		case <-ctx.Done():
		}
	}()
	options := logs.Options{Follow: req.GetFollow(), Tail: -1}
	if req.TailLines != nil {
		options.Tail = req.GetTailLines()
	}
	if since := req.GetSince(); since != nil {
		options.Since = since.AsTime()
	}
	err = s.config.Logs.Read(ctx, id, options, ended, func(p []byte) error {
		return stream.Send(&agentv1.StreamLogsResponse{Data: bytes.Clone(p)})
	})
	switch {
	case err == nil:
		return nil
	case errdefs.IsNotFound(err):
		return fault.Wrap(err, errdefs.ErrNotFound, fault.SandboxNotFound, "the log of sandbox %s was removed", req.GetFence().GetSandboxUid())
	case ctx.Err() != nil && stream.Context().Err() == nil:
		return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent is stopping")
	}
	return err
}
