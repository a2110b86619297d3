package command

import (
	"context"
	"time"

	"github.com/spf13/pflag"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/burst"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/create"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/density"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/gobench"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/rate"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/scale"
)

func via(fs *pflag.FlagSet, to *mesh.Options) {
	fs.StringVar(&to.Via, "via", mesh.ViaLeader, "`way` to the allocator: leader (straight to the leading one) or service")
	handler(fs, to)
}

func handler(fs *pflag.FlagSet, to *mesh.Options) {
	fs.StringVar(&to.Handler, "handler", "", "runtime `handler` of the pools, for instance fsb or runc; empty is that of the cluster's default pool")
}

func createSuite(fs *pflag.FlagSet) suite {
	o := create.Options{}
	fs.IntVar(&o.Rounds, "rounds", 100, "`number` of rounds, each with a sample of every series")
	fs.StringSliceVar(&o.Series, "series", create.AllSeries(), "what to measure: some of `them`")
	fs.IntVar(&o.PodEvery, "pod-every", 4, "measure a Pod once in this number of `rounds`: it takes a second")
	fs.DurationVar(&o.Pause, "pause", 600*time.Millisecond, "greatest `time` between samples; each pause is random")
	fs.Uint64Var(&o.Seed, "seed", 1, "`seed` of pauses and order")
	via(fs, &o.Mesh)
	return suite{"create", "single creates, beside raw containerd and plain Kubernetes", func(ctx context.Context, say func(string, ...any), r *report.Report) error {
		o.Say = say
		return create.Run(ctx, o, r)
	}}
}

func burstSuite(fs *pflag.FlagSet) suite {
	o := burst.Options{}
	fs.IntVarP(&o.N, "number", "n", 50, "`number` of creates at once")
	fs.IntVar(&o.Refill, "refill", 64, "`number` of slots that are claimed at once to measure how fast they come back; 0 for not")
	fs.IntVar(&o.Raw, "raw", 20, "`number` of raw containers, one at a time, as the baseline")
	via(fs, &o.Mesh)
	return suite{"burst", "many creates at once, with slots for all, for half and for none of them", func(ctx context.Context, say func(string, ...any), r *report.Report) error {
		o.Say = say
		return burst.Run(ctx, o, r)
	}}
}

func rateSuite(fs *pflag.FlagSet) suite {
	o := rate.Options{}
	fs.Float64Var(&o.Start, "start", 8, "first `rate` that is tried, creates a second")
	fs.Float64Var(&o.Precision, "precision", 0.05, "`share` of the rate within which it is searched")
	fs.DurationVar(&o.Limit, "limit", 250*time.Millisecond, "greatest p99 `latency` at a rate that holds")
	fs.DurationVar(&o.Probe, "probe", 10*time.Second, "`time` for which each rate is tried while searching")
	fs.DurationVar(&o.Duration, "duration", time.Minute, "`time` for which the rate that was found has to hold")
	fs.DurationVar(&o.Raw, "raw", 20*time.Second, "`time` of raw containers before and after that, each")
	fs.DurationVar(&o.Idle, "idle", 15*time.Second, "`time` without creates before and after that, each, for the CPU time of nothing")
	fs.IntVar(&o.Places, "places", 64, "`capacity` of the agent, and the number of its slots")
	via(fs, &o.Mesh)
	return suite{"rate", "creates and deletes at a constant rate, beside raw containerd", func(ctx context.Context, say func(string, ...any), r *report.Report) error {
		o.Say = say
		return rate.Run(ctx, o, r)
	}}
}

func insideSuite(fs *pflag.FlagSet) suite {
	o := inside.Options{}
	fs.IntVar(&o.Rounds, "rounds", 100, "`number` of samples of each series")
	fs.IntVar(&o.Parallel, "parallel", 16, "`number` of commands at once, where their rate is measured")
	fs.DurationVar(&o.Duration, "duration", 10*time.Second, "`time` for which the rate is measured")
	fs.IntVar(&o.FileBytes, "file-bytes", 256<<20, "`size` of the file that is written and read")
	fs.IntVar(&o.Terminals, "terminals", 200, "`number` of idle terminals")
	fs.DurationVar(&o.Idle, "idle", 20*time.Second, "`time` for which they are idle")
	return suite{"exec", "commands, terminals and files in a sandbox, beside containerd's exec", func(ctx context.Context, say func(string, ...any), r *report.Report) error {
		o.Say = say
		return inside.Measure(ctx, o, r)
	}}
}

func registrySuite(fs *pflag.FlagSet) suite {
	o := gobench.Options{}
	fs.IntVar(&o.Count, "count", 3, "`number` of runs of each benchmark; the median counts")
	fs.StringVar(&o.Time, "benchtime", "1s", "`time` of each run, as go test takes it")
	return suite{"registry", "what a create passes in memory: the Registry's Allocate, and the checks of its caller", func(ctx context.Context, say func(string, ...any), r *report.Report) error {
		o.Say = say
		return gobench.Run(ctx, o, r)
	}}
}

func scaleSuite(fs *pflag.FlagSet) suite {
	o := scale.Options{}
	fs.StringVar(&o.Bin, "bin", "bin", "`directory` of the built binaries, k8s/ with an API server and etcd in it")
	fs.IntVar(&o.Agents, "agents", 2000, "`number` of simulated agents")
	fs.IntVar(&o.Sandboxes, "sandboxes", 50, "`number` of sandboxes on each")
	fs.DurationVar(&o.Heartbeat, "heartbeat", time.Second, "`interval` of agents' heartbeats")
	fs.Float64Var(&o.Rate, "rate", 50, "creates `per second`, and as many deletes")
	fs.DurationVar(&o.Duration, "duration", time.Minute, "`time` that is measured")
	return suite{"scale", "one allocator with many agents", func(ctx context.Context, say func(string, ...any), r *report.Report) error {
		o.Say = say
		return scale.Run(ctx, o, r)
	}}
}

func densitySuite(fs *pflag.FlagSet) suite {
	o := density.Options{}
	fs.IntVarP(&o.N, "number", "n", 40, "`number` of capacity units that are filled")
	handler(fs, &o.Mesh)
	return suite{"density", "memory of slots and of sandboxes", func(ctx context.Context, say func(string, ...any), r *report.Report) error {
		o.Say = say
		return density.Run(ctx, o, r)
	}}
}
