package rpc

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// watchDelay is the minimum time between two messages of a watch: a busy node changes many times within it.
const watchDelay = 100 * time.Millisecond

// essence is the part of a finding whose change is reported: everything but times. It is comparable.
type essence struct {
	observation verdict.Observation
	assignment  verdict.Assignment
	remnant     verdict.Remnant
	verdict     verdict.Verdict
}

func essenceOf(f *Finding) essence {
	e := essence{verdict: f.Verdict}
	if f.Remnant != nil {
		e.remnant = *f.Remnant
		e.remnant.Since, e.remnant.DeletedAge = 0, 0
		return e
	}
	e.observation = *f.Observation
	e.observation.Age, e.observation.Missing = 0, 0
	if a := f.Observation.Resource.Assignment; a != nil {
		e.assignment, e.observation.Resource.Assignment = *a, nil
	}
	return e
}

// sent is what a watch last sent about one thing.
type sent struct {
	essence essence
	message *janitorv1.Verdict
}

// WatchVerdicts implements the service. Whenever something may have changed, it compares the findings with what it sent last.
// Short-lived verdicts can be missed; nothing accumulates for a slow caller.
func (s *Service) WatchVerdicts(req *janitorv1.WatchVerdictsRequest, stream grpc.ServerStreamingServer[janitorv1.WatchVerdictsResponse]) error {
	wanted := selection{req.GetActions(), req.GetReasons()}
	known := map[key]sent{}
	for synced := false; ; synced = true {
		changed := s.config.Core.Changed() // before Findings: later changes are seen by the next iteration
		found, err := s.findings(stream.Context(), wanted)
		if err != nil {
			return err
		}
		if err := s.send(stream, known, found); err != nil {
			return err
		}
		if !synced {
			if err := stream.Send(&janitorv1.WatchVerdictsResponse{Type: janitorv1.WatchVerdictsResponse_TYPE_SYNCED}); err != nil {
				return err
			}
		}
		if err := s.rest(stream.Context(), changed); err != nil {
			return err
		}
	}
}

// send sends the differences between found and known, and records them in known.
func (s *Service) send(stream grpc.ServerStreamingServer[janitorv1.WatchVerdictsResponse], known map[key]sent, found []Finding) error {
	gone := maps.Clone(known)
	for i := range found {
		k, e := found[i].key(), essenceOf(&found[i])
		delete(gone, k)
		if old, ok := known[k]; ok && old.essence == e {
			continue
		}
		m := s.message(&found[i])
		known[k] = sent{e, m}
		if err := stream.Send(&janitorv1.WatchVerdictsResponse{Type: janitorv1.WatchVerdictsResponse_TYPE_VERDICT, Verdict: m}); err != nil {
			return err
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(gone), compare) {
		delete(known, k)
		if err := stream.Send(&janitorv1.WatchVerdictsResponse{Type: janitorv1.WatchVerdictsResponse_TYPE_GONE, Verdict: gone[k].message}); err != nil {
			return err
		}
	}
	return nil
}

// rest waits until something may have changed, and for watchDelay.
func (s *Service) rest(ctx context.Context, changed <-chan struct{}) error {
	stopping := fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "the janitor is stopping")
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-s.closing:
		return stopping
	case <-changed:
	}
	timer := s.config.Clock.NewTimer(watchDelay)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-s.closing:
		return stopping
	case <-timer.C():
		return nil
	}
}
