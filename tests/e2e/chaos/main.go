// The command chaos is the fault harness: load by the public API while faults strike the local cluster, and an audit of
// all that was acknowledged. It prints one JSON object and ends with 0 only if nothing was lost, leaked, duplicated or is
// stuck. `make chaos` runs it; the environment must be that of `make -s env`. The containers of agent Pods that were
// killed are counted apart: nobody takes them away before there is a janitor.
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
	fs.Uint64Var(&o.Plan.Seed, "seed", o.Plan.Seed, "the same seed is the same sequence of operations and faults")
	fs.Float64Var(&o.Plan.Creates, "creates", o.Plan.Creates, "sandboxes asked for per second")
	fs.DurationVar(&o.Plan.FaultEvery, "fault-every", o.Plan.FaultEvery, "time between faults; 0 for none")
	fs.DurationVar(&o.Plan.MinLife, "min-life", o.Plan.MinLife, "how long a sandbox is kept at least")
	fs.DurationVar(&o.Plan.MaxLife, "max-life", o.Plan.MaxLife, "how long a sandbox is kept at most")
	fs.DurationVar(&o.Settle, "settle", o.Settle, "how long the mesh may take to come to rest")
	fs.StringVar(&o.LogFile, "log", "", "`file` for the clients' log and the faults")
	return cmd
}
