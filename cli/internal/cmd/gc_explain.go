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
		Short: "Show why an object is kept, waits, or is about to go",
		Long: `Show how an object stands with the garbage collector: which owners keep it, by which way from the first of them, which
finalizers and dependents hold its deletion up, what the collector does next with it, and what would let it go.`,
		Example: `  fsb-ctl gc explain pod/web-5d8f-x2x7v
  fsb-ctl gc explain rs web-5d8f -n shop -o json
  fsb-ctl gc explain --uid 5f0c9a52-7f0e-4a76-9a54-0d1c7b0d7d1c`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return aboutObject(cmd.Context(), c, *g, *s, args, func(ctx context.Context, c *cli, client gcv1.GarbageCollectorServiceClient, which *gcv1.Selector) error {
				in.Object = which
				out, err := call(ctx, c, "asking "+c.peer, func(ctx context.Context) (*gcv1.ExplainObjectResponse, error) { return client.ExplainObject(ctx, in) })
				if err != nil {
					return err
				}
				return printExplanation(c, out)
			})
		},
	}
	s.addFlags(c, g, cmd)
	cmd.Flags().Int32Var(&in.MaxBlockers, "max-blockers", 20, "how `many` dependents that hold a deletion up are listed")
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

// printObjectNames writes names of objects as kubectl does.
func printObjectNames(c *cli, objects ...*gcv1.Object) error {
	for _, o := range objects {
		if err := c.printNames(render.KindWord(o.GetPlace().GetKind()), o.GetPlace().GetName()); err != nil {
			return err
		}
	}
	return nil
}
