package cmd

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	janitorLabels = "app.kubernetes.io/name=janitor"
	// systemNamespace is where Fast Sandbox runs.
	systemNamespace = "fast-sandbox-system"
)

// janitors is which janitors a command asks, and how they are found.
type janitors struct {
	node, namespace, kubeconfig, context string
}

func newJanitor(c *cli) *cobra.Command {
	j := &janitors{}
	cmd := &cobra.Command{
		Use: "janitor", Aliases: []string{"janitors"}, Short: "See what the janitors of the nodes would remove, and have them do it",
		Long: `On each node a janitor removes containers that nobody owns any more, and what is left of containers. It needs nobody to do
that; these commands show what it makes of the node, and why, and have it clean up at once.

A janitor is reached through the Kubernetes API server, as "kubectl port-forward" does it, by the kubeconfig that kubectl uses:
reading and port-forwarding to Pods in the janitors' namespace must be allowed. Inside, it is mutual TLS with the same
certificates as everywhere (FSB_CACERT, FSB_CERT, FSB_KEY).`,
		Example: `  fsb-ctl janitor verdicts
  fsb-ctl janitor sweep --dry-run --node worker-3`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q, want verdicts or sweep", args[0])
			}
			return cmd.Help()
		},
	}
	fs := cmd.PersistentFlags()
	fs.StringVar(&j.node, "node", "", "only the janitor of this `node` (default: those of all nodes, one after the other)")
	fs.StringVar(&j.kubeconfig, "kubeconfig", "", "kubeconfig `file` [$KUBECONFIG]")
	fs.StringVar(&j.context, "context", "", "`context` of the kubeconfig (default: its current one)")
	fs.StringVar(&j.namespace, "janitor-namespace", systemNamespace, "`namespace` that the janitors run in")
	cmd.AddCommand(newJanitorVerdicts(c, j), newJanitorSweep(c, j))
	for _, sub := range cmd.Commands() {
		_ = sub.RegisterFlagCompletionFunc("node", func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			return c.completion(cmd, func(ctx context.Context) ([]string, error) { return janitorNodes(ctx, c, *j) })
		})
		_ = sub.RegisterFlagCompletionFunc("context", cobra.NoFileCompletions)
		_ = sub.RegisterFlagCompletionFunc("janitor-namespace", cobra.NoFileCompletions)
	}
	return cmd
}

// find returns the janitors' Pods.
func findJanitors(ctx context.Context, c *cli, j janitors) (Cluster, []tunnel.Pod, error) {
	cluster, err := c.Cluster(tunnel.Options{Kubeconfig: j.kubeconfig, Context: j.context, Getenv: c.Getenv})
	if err != nil {
		return nil, nil, err
	}
	found, err := call(ctx, c, "looking for janitors", func(ctx context.Context) ([]tunnel.Pod, error) {
		return cluster.Pods(ctx, tunnel.Selector{Namespace: j.namespace, Labels: janitorLabels, Node: j.node})
	})
	if err != nil {
		return nil, nil, err
	}
	if len(found) > 0 {
		return cluster, found, nil
	}
	where := "in namespace " + j.namespace
	if j.node != "" {
		where = "on node " + j.node
	}
	return nil, nil, fault.New(errdefs.ErrNotFound, reasonNoJanitor, "no janitor runs %s", where)
}

// janitorNodes completes nodes that have a janitor.
func janitorNodes(ctx context.Context, c *cli, j janitors) ([]string, error) {
	j.node = ""
	_, found, err := findJanitors(ctx, c, j)
	nodes := make([]string, len(found))
	for i, p := range found {
		nodes[i] = p.Node
	}
	return slices.Compact(nodes), err
}

// eachJanitor calls do with each janitor, one after the other, and goes on after a failure: it tells of all but the first and
// returns that.
func eachJanitor(ctx context.Context, c *cli, j janitors, do func(context.Context, *cli, janitorv1.JanitorServiceClient) error) error {
	cluster, found, err := findJanitors(ctx, c, j)
	if err != nil {
		return err
	}
	var first error
	for _, p := range found {
		err := atJanitor(ctx, c, cluster, p, do)
		switch {
		case ctx.Err() != nil:
			return err
		case err == nil:
		case first == nil:
			first = fmt.Errorf("node %s: %w", p.Node, err)
		default:
			c.infof("error: node %s: %s", p.Node, explain(err).message)
		}
	}
	return first
}

// atJanitor calls do with one janitor.
func atJanitor(ctx context.Context, c *cli, cluster Cluster, p tunnel.Pod, do func(context.Context, *cli, janitorv1.JanitorServiceClient) error) error {
	return c.at(ctx, cluster, p, remote{"the janitor of node " + p.Node, rpc.RoleJanitor}, func(ctx context.Context, c *cli, conn *grpc.ClientConn) error {
		return do(ctx, c, janitorv1.NewJanitorServiceClient(conn))
	})
}

// verdictFilter is which verdicts a command is about.
type verdictFilter struct{ actions, reasons []string }

func (f *verdictFilter) addReasons(cmd *cobra.Command, usage string) {
	cmd.Flags().StringSliceVar(&f.reasons, "reason", nil, usage)
	_ = cmd.RegisterFlagCompletionFunc("reason", cobra.FixedCompletions(render.VerdictReasons(), cobra.ShellCompDirectiveNoFileComp))
}

func (f *verdictFilter) parse() (actions []janitorv1.Action, reasons []janitorv1.Reason, err error) {
	for _, s := range f.actions {
		a, ok := render.ParseAction(s)
		if !ok {
			return nil, nil, usagef("--action is %q, want one of %s", s, strings.Join(render.VerdictActions(), ", "))
		}
		if !slices.Contains(actions, a) {
			actions = append(actions, a)
		}
	}
	for _, s := range f.reasons {
		r, ok := render.ParseReason(s)
		if !ok {
			return nil, nil, usagef("--reason is %q, want one of %s", s, strings.Join(render.VerdictReasons(), ", "))
		}
		if !slices.Contains(reasons, r) {
			reasons = append(reasons, r)
		}
	}
	return actions, reasons, nil
}
