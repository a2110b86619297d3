package cmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
)

func newGCPreview(c *cli, g *collectors) *cobra.Command {
	s, cascade := &subject{}, ""
	cmd := &cobra.Command{
		Use:   "preview OBJECT",
		Short: "Show what else a deletion would delete",
		Long: `Show what happens to which objects if OBJECT is deleted and nothing else changes: Goes (it is deleted), Stays (it loses an
owner and is kept), Held (it would be deleted, but whether another owner exists is not known). Nothing is deleted.

The preview covers the garbage collector only, not what controllers do in response: for instance, the controller of
sandboxes drains the agents of a deleted pool. --cascade is that of kubectl delete.`,
		Example: `  fsb-ctl gc preview deploy/web
  fsb-ctl gc preview deploy/web --cascade orphan
  fsb-ctl gc preview sandboxpool/default -o json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			policy, ok := render.ParsePolicy(cascade)
			if !ok {
				return usagef("--cascade is %q, want background, foreground or orphan", cascade)
			}
			return aboutObject(cmd.Context(), c, *g, *s, args, func(ctx context.Context, c *cli, client gcv1.GarbageCollectorServiceClient, which *gcv1.Selector) error {
				return preview(ctx, c, client, &gcv1.PreviewDeleteRequest{Object: which, Policy: policy})
			})
		},
	}
	s.addFlags(c, g, cmd)
	cmd.Flags().StringVar(&cascade, "cascade", "background", "`policy` of the deletion: background, foreground or orphan")
	_ = cmd.RegisterFlagCompletionFunc("cascade", cobra.FixedCompletions([]string{"background", "foreground", "orphan"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func preview(ctx context.Context, c *cli, client gcv1.GarbageCollectorServiceClient, in *gcv1.PreviewDeleteRequest) error {
	var all []*gcv1.Consequence
	var summary *gcv1.PreviewSummary
	o, err := openStream(ctx, c, "calling "+c.peer, func(ctx context.Context) (grpc.ServerStreamingClient[gcv1.PreviewDeleteResponse], error) {
		return client.PreviewDelete(ctx, in)
	})
	for m := o.first; err == nil; m, err = o.stream.Recv() {
		if m.GetConsequence() != nil {
			all = append(all, m.GetConsequence())
		}
		if m.GetSummary() != nil {
			summary = m.GetSummary()
		}
	}
	switch {
	case !errors.Is(err, io.EOF):
		return c.classify(err)
	case summary == nil:
		return c.classify(ended(err)) // without a summary, the preview is incomplete
	}
	return printPreview(c, all, summary)
}

func printPreview(c *cli, all []*gcv1.Consequence, summary *gcv1.PreviewSummary) error {
	switch c.settings.Output {
	case "json", "yaml":
		list, err := render.List("consequences", all)
		if err != nil {
			return err
		}
		raw, err := withSummary(list, summary)
		if err != nil {
			return err
		}
		return c.printJSON(raw)
	case "name":
		for _, one := range all {
			if one.GetOutcome() == gcv1.Outcome_OUTCOME_GOES {
				if err := printObjectNames(c, one.GetObject()); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return render.Preview(c.Out, all, summary, c.settings.Output == "wide")
}

// withSummary adds the summary to a list.
func withSummary(list []byte, summary *gcv1.PreviewSummary) ([]byte, error) {
	var whole map[string]json.RawMessage
	if err := json.Unmarshal(list, &whole); err != nil {
		return nil, fmt.Errorf("writing JSON: %w", err)
	}
	line, err := render.Line(summary)
	if err != nil {
		return nil, err
	}
	whole["summary"] = line
	raw, err := json.MarshalIndent(whole, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("writing JSON: %w", err)
	}
	return append(raw, '\n'), nil
}
