package cmd

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
)

// outputDot is the output format for Graphviz. dotAnnotation is on the commands that have it.
const (
	outputDot     = "dot"
	dotAnnotation = "fast-sandbox.io/dot"
)

func newGCGraph(c *cli, g *collectors) *cobra.Command {
	s, in, all := &subject{optional: true}, &gcv1.GetGraphRequest{}, false
	cmd := &cobra.Command{
		Use: "graph [OBJECT]", Annotations: map[string]string{dotAnnotation: "yes"},
		Short: "Show the graph of owners and dependents",
		Long: `Show the objects that OBJECT is connected to by owner references, in both directions, nearest first, and the state of each.
Without OBJECT, show the whole graph: the objects in the namespace of -n with their owners, or with -A all objects.

-o dot is for Graphviz: arrows lead from owners to dependents, as deletions do; thick ones block a foreground deletion, dashed
boxes are owners that are referred to and were not observed, dotted ones are about to be deleted.`,
		Example: `  fsb-ctl gc graph sandboxpool/default
  fsb-ctl gc graph deploy/web --depth 5 -o dot | dot -Tsvg > web.svg
  fsb-ctl gc graph -n shop
  fsb-ctl gc graph -A -o json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 && s.uid == "" {
				if cmd.Flags().Changed("depth") || cmd.Flags().Changed("max-objects") {
					return usagef("--depth and --max-objects require OBJECT")
				}
				namespace := c.settings.Namespace
				if all {
					namespace = ""
				}
				return wholeGraph(cmd.Context(), c, *g, &gcv1.StreamGraphRequest{Namespace: namespace})
			}
			if all {
				return usagef("OBJECT and --all-namespaces are mutually exclusive")
			}
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
	cmd.Flags().Int32Var(&in.Depth, "depth", 2, "maximum number of `references` from OBJECT")
	cmd.Flags().Int32Var(&in.MaxObjects, "max-objects", 200, "maximum `number` of objects around OBJECT")
	cmd.Flags().BoolVarP(&all, "all-namespaces", "A", false, "without OBJECT: the objects of all namespaces, and cluster-scoped objects")
	for _, flag := range []string{"depth", "max-objects"} {
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.NoFileCompletions)
	}
	return cmd
}

// wholeGraph prints the graph of a namespace, or of the whole cluster. It is printed when it is complete, so that a collector that
// fails in the middle can be replaced by another.
func wholeGraph(ctx context.Context, c *cli, g collectors, in *gcv1.StreamGraphRequest) error {
	cluster, err := g.open(c)
	if err != nil {
		return err
	}
	return askCollector(ctx, c, cluster, g, func(ctx context.Context, c *cli, client gcv1.GarbageCollectorServiceClient) error {
		whole := &gcv1.GetGraphResponse{}
		o, err := openStream(ctx, c, "calling "+c.peer, func(ctx context.Context) (grpc.ServerStreamingClient[gcv1.StreamGraphResponse], error) {
			return client.StreamGraph(ctx, in)
		})
		for m := o.first; err == nil; m, err = o.stream.Recv() {
			whole.Vertices = append(whole.Vertices, m.GetVertices()...)
			whole.References = append(whole.References, m.GetReferences()...)
		}
		if !errors.Is(err, io.EOF) {
			return c.classify(err)
		}
		switch c.settings.Output {
		case outputDot:
			return render.Dot(c.Out, whole)
		case "", "table", "wide":
			return render.WholeGraph(whole, c.settings.Output == "wide").Flush(c.Out)
		}
		return printGraph(c, whole)
	})
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
