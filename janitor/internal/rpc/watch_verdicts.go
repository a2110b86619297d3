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

// watchPause is how long a watch rests between two looks: a busy node changes many times within it.
const watchPause = 100 * time.Millisecond

// essence is what of a finding is worth telling when it changes: all but times. It can be compared.
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

// told is what a watch has told last of one thing.
type told struct {
	essence essence
	message *janitorv1.Verdict
}

// WatchVerdicts compares what is found with what it has told last, each time that something may have changed. Between two
// looks a caller misses what was true for a moment, and nothing piles up for one that reads slowly.
func (s *Service) WatchVerdicts(req *janitorv1.WatchVerdictsRequest, stream grpc.ServerStreamingServer[janitorv1.WatchVerdictsResponse]) error {
	wanted := selection{req.GetActions(), req.GetReasons()}
	known := map[key]told{}
	for synced := false; ; synced = true {
		changed := s.config.Core.Changed() // before the look: what changes after it is seen by the next one
		found, err := s.findings(stream.Context(), wanted)
		if err != nil {
			return err
		}
		if err := s.tell(stream, known, found); err != nil {
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

// tell sends how found differs from known, and notes it there.
func (s *Service) tell(stream grpc.ServerStreamingServer[janitorv1.WatchVerdictsResponse], known map[key]told, found []Finding) error {
	gone := maps.Clone(known)
	for i := range found {
		k, e := found[i].key(), essenceOf(&found[i])
		delete(gone, k)
		if old, ok := known[k]; ok && old.essence == e {
			continue
		}
		m := s.message(&found[i])
		known[k] = told{e, m}
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

// rest waits until something may have changed, and a moment more.
func (s *Service) rest(ctx context.Context, changed <-chan struct{}) error {
	stopping := fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "the janitor is stopping")
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-s.closing:
		return stopping
	case <-changed:
	}
	timer := s.config.Clock.NewTimer(watchPause)
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
