// Command escape is the attack suite: hostile code in sandboxes, hostile images, a hostile agent and hostile callers try everything that they
// must not be able to do, on the local cluster. It prints one JSON object and exits with 0 only if nothing has succeeded beyond the
// list of what later issues close. `make escape` runs it; it needs the environment of `make -s env` and root.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/run"
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
	o := run.Options{Out: os.Stderr}
	if path, err := os.Executable(); err == nil {
		o.Bin = filepath.Dir(path)
	}
	cmd := &cobra.Command{Use: "escape", Short: "The attack suite", Args: cobra.NoArgs, SilenceUsage: true}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		report, err := run.Run(cmd.Context(), o)
		if report != nil {
			fmt.Println(report)
		}
		if err == nil && !report.Good() {
			err = errors.New("an attempt did not end as it must")
		}
		return err
	}
	fs := cmd.Flags()
	fs.StringVar(&o.Bin, "bin", o.Bin, "`directory` of the programs escape-hostile and escape-agent")
	fs.StringSliceVar(&o.Only, "only", nil, "`parts` to run: "+strings.Join(run.PartNames(), ", "))
	return cmd
}
