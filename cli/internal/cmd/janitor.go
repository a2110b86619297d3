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
	// systemNamespace is where Fast Sandbox runs; its janitors have a namespace of their own.
	systemNamespace  = "fast-sandbox-system"
	janitorNamespace = "fast-sandbox-janitor"
)

// janitors selects janitors.
type janitors struct {
	clusterOptions
	node, namespace string
}

func newJanitor(c *cli) *cobra.Command {
	j := &janitors{}
	cmd := &cobra.Command{
		Use: "janitor", Aliases: []string{"janitors"}, Short: "Show what the janitors of the nodes would delete, and start a sweep",
		Long: `On each node, a janitor deletes containers without an owner, and remnants of containers. It does so by itself. These commands
show its verdicts with their reasons, and start a sweep at once.

A janitor is reached through the Kubernetes API server, as with "kubectl port-forward", with the kubeconfig of kubectl. The
user must be allowed to list Pods and to port-forward to them in the janitors' namespace. The connection inside is mutual
TLS with the certificates of the other commands (FSB_CACERT, FSB_CERT, FSB_KEY).`,
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
	fs.StringVar(&j.node, "node", "", "only the janitor of this `node` (default: the janitors of all nodes, one after the other)")
	j.addFlags(cmd, fs)
	fs.StringVar(&j.namespace, "janitor-namespace", janitorNamespace, "`namespace` of the janitors")
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

// findJanitors returns the Pods of the janitors.
func findJanitors(ctx context.Context, c *cli, j janitors) (Cluster, []tunnel.Pod, error) {
	cluster, err := j.open(c)
	if err != nil {
		return nil, nil, err
	}
	found, err := call(ctx, c, "finding janitors", func(ctx context.Context) ([]tunnel.Pod, error) {
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

// janitorNodes returns the nodes that have a janitor.
func janitorNodes(ctx context.Context, c *cli, j janitors) ([]string, error) {
	j.node = ""
	_, found, err := findJanitors(ctx, c, j)
	nodes := make([]string, len(found))
	for i, p := range found {
		nodes[i] = p.Node
	}
	return slices.Compact(nodes), err
}

// eachJanitor calls do with each janitor, one after the other, and continues after an error. It returns the first error and
// reports the others.
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
	return c.at(ctx, cluster, p, remote{name: "the janitor of node " + p.Node, role: rpc.RoleJanitor, port: remotePort}, func(ctx context.Context, c *cli, conn *grpc.ClientConn) error {
		return do(ctx, c, janitorv1.NewJanitorServiceClient(conn))
	})
}

// verdictFilter selects verdicts.
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
