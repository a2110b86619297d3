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
		Short: "Show the status of the garbage collectors",
		Long: `Show for each replica of the garbage collector whether it deletes (at most one does; none if they only observe), whether
deletions have stopped because there were too many, the size of its graph, and the resources that it cannot watch.
Dependents of objects of these resources are not deleted.`,
		Example:           "  fsb-ctl gc status\n  fsb-ctl gc status -o json",
		Args:              exactly(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return collectorStatus(cmd.Context(), c, *g) },
	}
}

// collectorStatus prints the status of the collectors that answer. It returns the first error of the others.
func collectorStatus(ctx context.Context, c *cli, g collectors) error {
	cluster, err := g.open(c)
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
			out, err := call(ctx, c, "calling "+c.peer, func(ctx context.Context) (*gcv1.GetStatusResponse, error) {
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
