// The command chaos is the fault harness: load by the public API while faults strike the local cluster, and an audit of
// all that was acknowledged. It prints one JSON object and ends with 0 only if nothing was lost, leaked, duplicated or is
// stuck. `make chaos` runs it; the environment must be that of `make -s env`. The containers of agent Pods that were
// killed are counted apart: nobody takes them away before there is a janitor.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/run"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	o := run.Options{Out: os.Stderr}
	cmd := &cobra.Command{Use: "chaos", Args: cobra.NoArgs, SilenceUsage: true, RunE: func(cmd *cobra.Command, _ []string) error {
		report, err := run.Run(cmd.Context(), o)
		if report != nil {
			fmt.Println(report)
		}
		if err == nil && !report.Good() {
			err = fmt.Errorf("promises were broken")
		}
		return err
	}}
	fs := cmd.Flags()
	fs.DurationVar(&o.Plan.Duration, "duration", 2*time.Minute, "how long load and faults last")
	fs.Uint64Var(&o.Plan.Seed, "seed", 1, "the same seed is the same sequence of operations and faults")
	fs.Float64Var(&o.Plan.Creates, "creates", 3, "sandboxes asked for per second")
	fs.DurationVar(&o.Plan.FaultEvery, "fault-every", 5*time.Second, "time between faults; 0 for none")
	fs.DurationVar(&o.Plan.MinLife, "min-life", time.Second, "how long a sandbox is kept at least")
	fs.DurationVar(&o.Plan.MaxLife, "max-life", 20*time.Second, "how long a sandbox is kept at most")
	fs.DurationVar(&o.Settle, "settle", 90*time.Second, "how long the mesh may take to come to rest")
	fs.StringVar(&o.LogFile, "log", "", "`file` for the clients' log and the faults")
	if cmd.ExecuteContext(ctx) != nil {
		os.Exit(1)
	}
}
