package cmd

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
)

func newGCStatus(c *cli, g *collectors) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show whether the garbage collectors work",
		Long: `Show of each replica of the garbage collector whether it deletes (one at most does; none if they observe), whether deletions
have stopped because there were too many, how large its graph is, and which resources it cannot watch: what depends on
objects of those is left alone.`,
		Example:           "  fsb-ctl gc status\n  fsb-ctl gc status -o json",
		Args:              exactly(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return collectorStatus(cmd.Context(), c, *g) },
	}
}

// collectorStatus prints those of the collectors that answered, whatever became of the others.
func collectorStatus(ctx context.Context, c *cli, g collectors) error {
	cluster, err := clusterOf(c, g)
	if err != nil {
		return err
	}
	found, err := findCollectors(ctx, c, cluster, g)
	if err != nil {
		return err
	}
	t := render.NewTable("POD", "ENFORCING", "OBJECTS", "UNSEEN-OWNERS", "REFERENCES", "FAILING", "STOPPED")
	type one struct {
		Pod    string          `json:"pod"`
		Status json.RawMessage `json:"status"`
	}
	all := []one{}
	var failed error
	for _, p := range found {
		err := atCollector(ctx, c, cluster, p, func(ctx context.Context, c *cli, client gcv1.GarbageCollectorServiceClient) error {
			out, err := call(ctx, c, "asking "+c.peer, func(ctx context.Context) (*gcv1.GetStatusResponse, error) {
				return client.GetStatus(ctx, &gcv1.GetStatusRequest{})
			})
			if err != nil {
				return err
			}
			line, err := render.Line(out)
			t.Add(render.CollectorRow(p.Name, out)...)
			all = append(all, one{p.Name, line})
			return err
		})
		if err != nil && failed == nil {
			failed = fmt.Errorf("pod %s: %w", p.Name, err)
		}
	}
	if len(all) == 0 {
		return failed
	}
	if c.settings.Output == "json" || c.settings.Output == "yaml" {
		raw, err := json.MarshalIndent(map[string]any{"collectors": all}, "", "  ")
		if err != nil {
			return fmt.Errorf("writing JSON: %w", err)
		}
		if err := c.printJSON(append(raw, '\n')); err != nil {
			return err
		}
		return failed
	}
	if c.settings.Output == "name" {
		for _, a := range all {
			if err := c.printNames("pod", a.Pod); err != nil {
				return err
			}
		}
		return failed
	}
	if err := t.Flush(c.Out); err != nil {
		return err
	}
	return failed
}
