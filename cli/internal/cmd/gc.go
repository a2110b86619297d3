package cmd

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/kinds"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const gcLabels = "app.kubernetes.io/name=gc"

// collectors selects garbage collectors.
type collectors struct {
	clusterOptions
	namespace string
}

func newGC(c *cli) *cobra.Command {
	g := &collectors{}
	cmd := &cobra.Command{
		Use: "gc", Aliases: []string{"garbage"}, Short: "Explain why objects are kept, preview deletions, and watch the garbage collector",
		Long: `The garbage collector deletes objects whose owners no longer exist, and Pods that no controller deletes. It watches every kind
of object in the cluster. These commands show why an object is kept and what a deletion does. They change nothing. A
collector that only observes, because that of Kubernetes is active, gives the same answers.

OBJECT has the form that kubectl takes: deploy/web, deployment.apps/web, pods web. Its namespace is that of -n.

The collector is reached through the Kubernetes API server, as with "kubectl port-forward", with the kubeconfig of kubectl.
The user must be allowed to list Pods and to port-forward to them in the collector's namespace. The connection inside is
mutual TLS with the certificates of the other commands (FSB_CACERT, FSB_CERT, FSB_KEY).`,
		Example: `  fsb-ctl gc explain pod/web-5d8f-x2x7v
  fsb-ctl gc preview deploy/web --cascade orphan
  fsb-ctl gc watch -A`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q, want explain, preview, graph, watch or status", args[0])
			}
			return cmd.Help()
		},
	}
	fs := cmd.PersistentFlags()
	g.addFlags(cmd, fs)
	fs.StringVar(&g.namespace, "gc-namespace", systemNamespace, "`namespace` of the garbage collector")
	cmd.AddCommand(newGCExplain(c, g), newGCPreview(c, g), newGCGraph(c, g), newGCWatch(c, g), newGCStatus(c, g))
	for _, sub := range cmd.Commands() {
		_ = sub.RegisterFlagCompletionFunc("context", cobra.NoFileCompletions)
		_ = sub.RegisterFlagCompletionFunc("gc-namespace", cobra.NoFileCompletions)
	}
	return cmd
}

// findCollectors returns the Pods of the collectors that are ready: they have observed every object. If none is ready, it returns
// all.
func findCollectors(ctx context.Context, c *cli, cluster Cluster, g collectors) ([]tunnel.Pod, error) {
	found, err := call(ctx, c, "finding garbage collectors", func(ctx context.Context) ([]tunnel.Pod, error) {
		return cluster.Pods(ctx, tunnel.Selector{Namespace: g.namespace, Labels: gcLabels})
	})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, fault.New(errdefs.ErrNotFound, reasonNoCollector, "no garbage collector of Fast Sandbox runs in namespace %s", g.namespace)
	}
	ready := slices.DeleteFunc(slices.Clone(found), func(p tunnel.Pod) bool { return !p.Ready })
	if len(ready) > 0 {
		return ready, nil
	}
	c.infof("note: no garbage collector is ready: the result may be incomplete")
	return found, nil
}

// atCollector calls do with one collector.
func atCollector(ctx context.Context, c *cli, cluster Cluster, p tunnel.Pod, do func(context.Context, *cli, gcv1.GarbageCollectorServiceClient) error) error {
	return c.at(ctx, cluster, p, remote{name: "the garbage collector in Pod " + p.Name, role: rpc.RoleGC, port: remotePort}, func(ctx context.Context, c *cli, conn *grpc.ClientConn) error {
		return do(ctx, c, gcv1.NewGarbageCollectorServiceClient(conn))
	})
}

// askCollector calls do with the first collector that can be reached: all of them observe the same objects.
func askCollector(ctx context.Context, c *cli, cluster Cluster, g collectors, do func(context.Context, *cli, gcv1.GarbageCollectorServiceClient) error) error {
	found, err := findCollectors(ctx, c, cluster, g)
	if err != nil {
		return err
	}
	var first error
	for _, p := range found {
		err := atCollector(ctx, c, cluster, p, do)
		if err == nil || ctx.Err() != nil || !errdefs.IsUnavailable(err) {
			return err
		}
		if first == nil {
			first = err
		}
	}
	return first
}

// subject is the object of a command.
type subject struct {
	uid string
	// optional permits a command without an object.
	optional bool
}

func (s *subject) addFlags(c *cli, g *collectors, cmd *cobra.Command) {
	cmd.Flags().StringVar(&s.uid, "uid", "", "`UID` of the object, instead of OBJECT")
	cmd.Args = func(_ *cobra.Command, args []string) error {
		if s.uid != "" && len(args) > 0 {
			return usagef("OBJECT and --uid are mutually exclusive")
		}
		if s.uid == "" && (len(args) > 0 || !s.optional) {
			if _, _, err := kinds.Parse(args); err != nil {
				return usageError{err}
			}
		}
		return nil
	}
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
		return c.completion(cmd, func(ctx context.Context) ([]string, error) { return completeObject(ctx, c, *g, args, toComplete) })
	}
}

// of returns the selector of the object and its name for people.
func (s *subject) of(ctx context.Context, c *cli, cluster Cluster, args []string) (*gcv1.Selector, string, error) {
	if s.uid != "" {
		return &gcv1.Selector{By: &gcv1.Selector_Uid{Uid: s.uid}}, "uid " + s.uid, nil
	}
	spelling, name, err := kinds.Parse(args)
	if err != nil {
		return nil, "", usageError{err}
	}
	all, err := call(ctx, c, "listing kinds of objects", cluster.Kinds)
	if err != nil {
		return nil, "", err
	}
	k, ok := all.Find(spelling)
	if !ok {
		return nil, "", fault.New(errdefs.ErrNotFound, reasonNoKind, "the cluster has no kind %q", spelling)
	}
	object := &gcv1.Place{Kind: &gcv1.Kind{Group: k.Group, Kind: k.Kind}, Name: name}
	label := k.String() + " " + name
	if k.Namespaced {
		object.Namespace = c.settings.Namespace
		label = k.String() + " " + object.GetNamespace() + "/" + name
	}
	return &gcv1.Selector{By: &gcv1.Selector_Place{Place: object}}, label, nil
}

// aboutObject calls do with a collector and the object of the command.
func aboutObject(ctx context.Context, c *cli, g collectors, s subject, args []string, do func(context.Context, *cli, gcv1.GarbageCollectorServiceClient, *gcv1.Selector) error) error {
	cluster, err := g.open(c)
	if err != nil {
		return err
	}
	selector, label, err := s.of(ctx, c, cluster, args)
	if err != nil {
		return err
	}
	return askCollector(ctx, c, cluster, g, func(ctx context.Context, c *cli, client gcv1.GarbageCollectorServiceClient) error {
		err := do(ctx, c, client, selector)
		if errdefs.IsNotFound(err) {
			return fault.New(errdefs.ErrNotFound, reasonNoObject, "the garbage collector has not observed %s", label)
		}
		return err
	})
}

// completeObject completes kinds, and names after a kind.
func completeObject(ctx context.Context, c *cli, g collectors, args []string, toComplete string) ([]string, error) {
	cluster, err := g.open(c)
	if err != nil || len(args) > 1 {
		return nil, err
	}
	all, err := cluster.Kinds(ctx)
	if err != nil {
		return nil, err
	}
	spelling, _, named := strings.Cut(toComplete, "/")
	prefix := spelling + "/"
	if len(args) == 1 {
		spelling, prefix, named = args[0], "", true
	}
	if !named {
		out := make([]string, len(all))
		for i, k := range all {
			out[i] = k.Resource
		}
		slices.Sort(out)
		return slices.Compact(out), nil
	}
	k, ok := all.Find(spelling)
	if !ok || !k.Listed {
		return nil, fmt.Errorf("no names of %q", spelling)
	}
	names, err := cluster.Names(ctx, k, c.settings.Namespace)
	for i := range names {
		names[i] = prefix + names[i]
	}
	return names, err
}
