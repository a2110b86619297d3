package command

import (
	"context"
	"time"

	"github.com/spf13/pflag"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/gc"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

func gcSuite(fs *pflag.FlagSet) suite {
	o := gc.Options{}
	fs.StringVar(&o.Bin, "bin", "bin", "`directory` of the built binaries, k8s/ with Kubernetes' own in it")
	fs.IntVar(&o.Dependents, "dependents", 10_000, "`number` of dependents of the one tree")
	fs.IntVar(&o.Pairs, "pairs", 1000, "`number` of pairs of an owner and its dependent")
	fs.DurationVar(&o.DefaultFor, "default-for", 2*time.Minute, "`time` for which kube-controller-manager with its default limits is watched at the tree; 0 is to the end (about 9 min)")
	fs.IntVar(&o.Rounds, "rounds", 1, "`number` of rounds, each with every collector")
	return suite{"gc", "the garbage collectors, beside kube-controller-manager's", func(ctx context.Context, say func(string, ...any), r *report.Report) error {
		o.Say = say
		return gc.Run(ctx, o, r)
	}}
}
