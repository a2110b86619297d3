package rpc

import (
	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

type pulled struct {
	name string
	err  error
}

// PullImage pulls an image to the node. Progress that the caller is too slow to receive is dropped.
func (s *Service) PullImage(req *agentv1.PullImageRequest, stream grpc.ServerStreamingServer[agentv1.PullImageResponse]) error {
	begun := s.config.Clock.Now()
	latest, done := make(chan runtime.Progress, 1), make(chan pulled, 1)
	ctx := stream.Context()
	go func() {
		name, err := s.config.Runtime.Pull(ctx, req.GetImage(), func(p runtime.Progress) {
			select {
			case <-latest: // replaced by the newer one
			default:
			}
			select {
			case latest <- p:
			default:
			}
		})
		done <- pulled{name, err}
	}()
	send := func(p runtime.Progress, image string) error {
		return stream.Send(&agentv1.PullImageResponse{Image: image, Progress: &agentv1.PullProgress{
			DownloadedBytes: p.Downloaded, TotalBytes: p.Total, Phase: p.Phase, Elapsed: duration(s.config.Clock.Since(begun)),
		}})
	}
	var last runtime.Progress
	for {
		select {
		case p := <-latest:
			last = p
			if p.Phase == runtime.PhaseDone {
				continue // sent below, with the name
			}
			if err := send(p, ""); err != nil {
				<-done // the stream's context has ended with the stream
				return err
			}
		case result := <-done:
			if result.err != nil {
				return result.err
			}
			select {
			case last = <-latest:
			default:
			}
			last.Phase, last.Downloaded = runtime.PhaseDone, last.Total
			return send(last, result.name)
		}
	}
}
