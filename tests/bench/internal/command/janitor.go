package command

import (
	"context"
	"time"

	"github.com/spf13/pflag"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/janitor"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

func janitorSuite(fs *pflag.FlagSet) suite {
	o := janitor.Options{}
	fs.StringVar(&o.Bin, "bin", "bin", "`directory` of the built binaries, containerd/ and k8s/ in it")
	fs.IntVar(&o.Containers, "containers", 1000, "`number` of containers on the node")
	fs.IntVar(&o.Fewer, "fewer", 100, "`number` of containers that is measured at first; 0 for not")
	fs.IntVar(&o.Scans, "scans", 30, "`number` of scans that are measured at each number of containers")
	fs.DurationVar(&o.Interval, "interval", time.Second, "`time` from scan to scan")
	return suite{"janitor", "one scan of a node by its janitor", func(ctx context.Context, say func(string, ...any), r *report.Report) error {
		o.Say = say
		return janitor.Run(ctx, o, r)
	}}
}
