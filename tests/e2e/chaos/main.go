// Command chaos is the fault harness: load through the public API while faults are injected into the local cluster, and an audit
// of everything that was acknowledged. It prints one JSON object and exits with 0 only if nothing was lost, leaked, duplicated or
// is stuck. `make chaos` runs it; it needs the environment of `make -s env`. The janitor must delete what killed agents
// leave, and the garbage collector what deleted owners leave; the harness deletes neither. With --disable janitor a run must
// fail.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/run"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if command().ExecuteContext(ctx) != nil {
		stop()
		os.Exit(1)
	}
}

func command() *cobra.Command {
	o := run.Defaults()
	o.Out = os.Stderr
	cmd := &cobra.Command{Use: "chaos", Short: "Load, faults and an audit", Args: cobra.NoArgs, SilenceUsage: true}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		report, err := run.Run(cmd.Context(), o)
		if report != nil {
			fmt.Println(report)
		}
		if err == nil && !report.Good() {
			err = errors.New("promises were broken")
		}
		return err
	}
	fs := cmd.Flags()
	fs.DurationVar(&o.Plan.Duration, "duration", o.Plan.Duration, "how long load and faults last")
	fs.Uint64Var(&o.Plan.Seed, "seed", o.Plan.Seed, "the same seed gives the same sequence of operations and faults")
	fs.Float64Var(&o.Plan.Creates, "creates", o.Plan.Creates, "creates per second")
	fs.DurationVar(&o.Plan.FaultEvery, "fault-every", o.Plan.FaultEvery, "time between faults; 0 for none")
	fs.DurationVar(&o.Plan.MinLife, "min-life", o.Plan.MinLife, "how long a sandbox is kept at least")
	fs.DurationVar(&o.Plan.MaxLife, "max-life", o.Plan.MaxLife, "how long a sandbox is kept at most")
	fs.DurationVar(&o.Settle, "settle", o.Settle, "how long the mesh may take to settle, the janitor included")
	fs.StringVar(&o.Disable, "disable", "", "`component` to switch off during the run, which must then fail: janitor")
	fs.StringVar(&o.LogFile, "log", "", "`file` for the clients' log and the faults")
	return cmd
}
