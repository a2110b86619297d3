package cmd

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
)

func newGCExplain(c *cli, g *collectors) *cobra.Command {
	s, in := &subject{}, &gcv1.ExplainObjectRequest{}
	cmd := &cobra.Command{
		Use:   "explain OBJECT",
		Short: "Show why an object is kept, waits, or is about to be deleted",
		Long: `Show the state of an object for the garbage collector: the owners that keep it, the path from the first owner, the
finalizers and dependents that block its deletion, the next action of the collector, and what would unblock the deletion.`,
		Example: `  fsb-ctl gc explain pod/web-5d8f-x2x7v
  fsb-ctl gc explain rs web-5d8f -n shop -o json
  fsb-ctl gc explain --uid 5f0c9a52-7f0e-4a76-9a54-0d1c7b0d7d1c`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return aboutObject(cmd.Context(), c, *g, *s, args, func(ctx context.Context, c *cli, client gcv1.GarbageCollectorServiceClient, which *gcv1.Selector) error {
				in.Object = which
				out, err := call(ctx, c, "calling "+c.peer, func(ctx context.Context) (*gcv1.ExplainObjectResponse, error) { return client.ExplainObject(ctx, in) })
				if err != nil {
					return err
				}
				return printExplanation(c, out)
			})
		},
	}
	s.addFlags(c, g, cmd)
	cmd.Flags().Int32Var(&in.MaxBlockers, "max-blockers", 20, "maximum `number` of blocking dependents to list")
	_ = cmd.RegisterFlagCompletionFunc("max-blockers", cobra.NoFileCompletions)
	return cmd
}

func printExplanation(c *cli, x *gcv1.ExplainObjectResponse) error {
	if done, err := c.print(x); done {
		return err
	}
	if c.settings.Output == "name" {
		return printObjectNames(c, append([]*gcv1.Object{x.GetObject()}, x.GetPath()...)...)
	}
	return render.Explanation(c.Out, x)
}

// printObjectNames prints names of objects in the form of kubectl.
func printObjectNames(c *cli, objects ...*gcv1.Object) error {
	for _, o := range objects {
		if err := c.printNames(render.KindWord(o.GetPlace().GetKind()), o.GetPlace().GetName()); err != nil {
			return err
		}
	}
	return nil
}
