package cmd

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
)

// outputDot is the output format for Graphviz. dotAnnotation is on the commands that have it.
const (
	outputDot     = "dot"
	dotAnnotation = "fast-sandbox.io/dot"
)

func newGCGraph(c *cli, g *collectors) *cobra.Command {
	s, in := &subject{}, &gcv1.GetGraphRequest{}
	cmd := &cobra.Command{
		Use: "graph OBJECT", Annotations: map[string]string{dotAnnotation: "yes"},
		Short: "Show the owners and dependents around an object",
		Long: `Show the objects that OBJECT is connected to by owner references, in both directions, nearest first, and how each stands.
-o dot is for Graphviz: arrows lead from owners to dependents, as deletions do; thick ones block a foreground deletion,
dashed boxes are owners that are referred to and were not seen, dotted ones are going.`,
		Example: `  fsb-ctl gc graph sandboxpool/default
  fsb-ctl gc graph deploy/web --depth 5 -o dot | dot -Tsvg > web.svg`,
		RunE: func(cmd *cobra.Command, args []string) error {
			in.Dot = c.settings.Output == outputDot
			return aboutObject(cmd.Context(), c, *g, *s, args, func(ctx context.Context, c *cli, client gcv1.GarbageCollectorServiceClient, which *gcv1.Selector) error {
				in.Object = which
				out, err := call(ctx, c, "calling "+c.peer, func(ctx context.Context) (*gcv1.GetGraphResponse, error) { return client.GetGraph(ctx, in) })
				if err != nil {
					return err
				}
				return printGraph(c, out)
			})
		},
	}
	s.addFlags(c, g, cmd)
	cmd.Flags().Int32Var(&in.Depth, "depth", 2, "how many `references` away to look")
	cmd.Flags().Int32Var(&in.MaxObjects, "max-objects", 200, "how `many` objects to show")
	for _, flag := range []string{"depth", "max-objects"} {
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.NoFileCompletions)
	}
	return cmd
}

func printGraph(c *cli, out *gcv1.GetGraphResponse) error {
	if out.GetTruncated() {
		c.infof("note: there is more within that depth: --max-objects")
	}
	if done, err := c.print(out); done {
		return err
	}
	switch c.settings.Output {
	case outputDot:
		_, err := fmt.Fprint(c.Out, out.GetDot())
		return err
	case "name":
		for _, v := range out.GetVertices() {
			if err := printObjectNames(c, v.GetObject()); err != nil {
				return err
			}
		}
		return nil
	}
	return render.Graph(out, c.settings.Output == "wide").Flush(c.Out)
}
