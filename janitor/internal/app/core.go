package app

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	janitorrpc "github.com/fast-sandbox/fast-sandbox/janitor/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/sweep"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// core is the janitor as its API needs it.
type core struct {
	state   *observe.NodeState
	sweeper *sweep.Sweeper
}

var _ janitorrpc.Core = core{}

// Findings implements janitorrpc.Core.
func (c core) Findings(context.Context) ([]janitorrpc.Finding, error) {
	found, err := c.state.Findings()
	if err != nil {
		return nil, err
	}
	out := make([]janitorrpc.Finding, len(found))
	for i, f := range found {
		out[i] = finding(f)
	}
	return out, nil
}

// Changed implements janitorrpc.Core.
func (c core) Changed() <-chan struct{} { return c.state.Changed() }

// Sweep implements janitorrpc.Core.
func (c core) Sweep(ctx context.Context, o janitorrpc.Order, report func(janitorrpc.Result) error) error {
	if !c.state.Ready() {
		_, err := c.state.Findings()
		return err
	}
	if err := c.state.Scan(ctx); err != nil {
		return fault.Wrap(err, errdefs.ErrUnavailable, fault.RuntimeUnavailable, "the node could not be scanned as a whole")
	}
	found, err := c.state.Findings()
	if err != nil {
		return err
	}
	for _, f := range found {
		if !o.IDs[f.Key.ID] && !o.Selects(f.Key.ID, f.Verdict) {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		wanted := func(v verdict.Verdict) bool { return o.Selects(f.Key.ID, v) }
		r := c.sweeper.Sweep(context.WithoutCancel(ctx), f.Key, wanted, o.DryRun)
		if r.Outcome == sweep.Gone { // removed by another component since the scan
			continue
		}
		if r.Finding.Observation == nil && r.Finding.Remnant == nil {
			r.Finding = f
		}
		if err := report(result(r)); err != nil {
			return fmt.Errorf("reporting a sweep: %w", err)
		}
	}
	return nil
}

func finding(f observe.Finding) janitorrpc.Finding {
	return janitorrpc.Finding{Observation: f.Observation, Remnant: f.Remnant, Verdict: f.Verdict, Time: f.Time}
}

func result(r sweep.Result) janitorrpc.Result {
	out := janitorrpc.Result{Finding: finding(r.Finding), Err: r.Err, FreedBytes: r.FreedBytes}
	switch r.Outcome {
	case sweep.WouldDelete:
		out.Outcome = janitorrpc.WouldDelete
	case sweep.Kept:
		out.Outcome = janitorrpc.Kept
	case sweep.Failed:
		out.Outcome = janitorrpc.Failed
	default:
		out.Outcome = janitorrpc.Deleted
	}
	return out
}
