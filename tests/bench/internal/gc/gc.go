// Package gc measures services/gc beside the collectors of kube-controller-manager, with that program's default flags and
// with its client limits lifted: how soon dependents are deleted after their owner, and what that costs. They run one at a
// time, on the same API server, each with new objects.
package gc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

// Options set the amount of measurements.
type Options struct {
	// Bin is where the built binaries are.
	Bin string
	// Dependents of the one tree, Pairs of an owner with a dependent each.
	Dependents, Pairs int
	// DefaultFor is how long kube-controller-manager with its default flags is watched at the tree; 0 is to the end.
	DefaultFor time.Duration
	// Rounds is how often each candidate is measured. Which one is the first changes from round to round.
	Rounds int
	Say    func(format string, args ...any)
}

const (
	// settleTime lets a collector become idle before its memory is read.
	settleTime = 10 * time.Second
	// tailTime lets it finish what follows from the last deletion before its CPU time is read.
	tailTime = time.Second
)

// Run measures and fills the report. Everything that it started has ended when it returns.
func Run(ctx context.Context, o Options, r *report.Report) (err error) {
	if o.Dependents < 1 || o.Pairs < 1 || o.Rounds < 1 || o.DefaultFor < 0 {
		return errors.New("--dependents, --pairs and --rounds have to be at least 1, --default-for at least 0")
	}
	bin, err := filepath.Abs(o.Bin)
	if err != nil {
		return fmt.Errorf("finding the binaries: %w", err)
	}
	dir, err := os.MkdirTemp("", "fsb-bench-")
	if err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	w, err := newTestbed(o, bin, dir)
	defer func() { err = errors.Join(err, w.close()) }()
	if err != nil {
		return err
	}
	candidates := candidates(o)
	var runs []Measured
	for round := range o.Rounds {
		for i := range candidates {
			m, err := w.measure(ctx, candidates[(i+round)%len(candidates)], round)
			if err != nil {
				return err
			}
			runs = append(runs, *m)
		}
	}
	conditions(r, o, candidates)
	Sum(r, runs)
	r.Judge(budget.GC())
	return nil
}

// measure runs one candidate, from its start to its end.
func (w *testbed) measure(ctx context.Context, c candidate, round int) (m *Measured, err error) {
	m = &Measured{Candidate: c.key, Round: round, At: time.Now(), Nodes: 1 + w.Dependents + 2*w.Pairs}
	set, err := w.newSet(ctx, fmt.Sprintf("%s-%d", c.key, round))
	if err != nil {
		return nil, err
	}
	p, err := w.start(c, round)
	if err != nil {
		return nil, err
	}
	defer p.Kill()
	if err := w.collects(ctx, p); err != nil {
		return nil, err
	}
	if m.Empty, err = p.memory(ctx); err != nil {
		return nil, err
	}
	if err := set.populate(ctx); err != nil {
		return nil, err
	}
	if m.Full, err = p.memory(ctx); err != nil {
		return nil, err
	}
	if m.Pairs, err = set.watch(ctx, p, pairDependents, w.Pairs, 0, set.dropPairs); err != nil {
		return nil, err
	}
	w.Say("%s: %d of %d pairs' dependents are deleted after %.1f s", c.key, len(m.Pairs.Deleted), w.Pairs, m.Pairs.Watched.Seconds())
	if m.Tree, err = set.watch(ctx, p, treeDependents, w.Dependents, c.limit, set.dropTree); err != nil {
		return nil, err
	}
	w.Say("%s: %d of the tree's %d dependents are deleted after %.1f s", c.key, len(m.Tree.Deleted), w.Dependents, m.Tree.Watched.Seconds())
	p.Kill()
	return m, set.clear(ctx)
}

func conditions(r *report.Report, o Options, candidates []candidate) {
	r.Fact("tree", fmt.Sprintf("one owner with %d dependents, depth %d, deleted with the policy Background", o.Dependents, depth))
	r.Fact("pairs", fmt.Sprintf("%d owners with a dependent each; the owners are deleted one by one, 24 at a time", o.Pairs))
	r.Fact("objects", "ConfigMaps of some 300 bytes, each with one reference to its controller, which it blocks")
	r.Fact("rounds", o.Rounds)
	for _, c := range candidates {
		r.Fact(c.key, c.title)
	}
	r.Fact("common", "none elects a leader; all have the same account, which API priority and fairness does not limit; both programs' PodGC is on")
	if o.DefaultFor > 0 {
		r.Fact("bound", fmt.Sprintf("default is watched for %s of the tree at most, the rest of its time is computed by its rate in the second half of that; default_measured_fraction is the part that was measured", o.DefaultFor))
	}
	r.Fact("beside_it", fmt.Sprintf("on the same %d cores: etcd (which does not sync), kube-apiserver, and one watch by the benchmark", runtime.NumCPU()))
}
