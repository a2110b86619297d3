package cmd

import (
	"context"
	"sync"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
)

func newGCWatch(c *cli, g *collectors) *cobra.Command {
	all := false
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Watch the deletions of the garbage collector",
		Long: `Show each deletion by the garbage collector from now on, with its cause, until Ctrl-C: in the namespace of -n, or with -A in
all namespaces and of cluster-scoped objects. Deletions by others are not shown. All replicas are watched, because another
one may become the one that deletes.`,
		Example:           "  fsb-ctl gc watch -A\n  fsb-ctl gc watch -n shop -o json",
		Args:              exactly(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			namespace := c.settings.Namespace
			if all {
				namespace = ""
			}
			return watchDeletions(cmd.Context(), c, *g, &gcv1.WatchDeletionsRequest{Namespace: namespace})
		},
	}
	cmd.Flags().BoolVarP(&all, "all-namespaces", "A", false, "deletions in all namespaces, and of cluster-scoped objects")
	return cmd
}

// deletionWatcher prints the deletions of several collectors.
type deletionWatcher struct {
	c       *cli
	in      *gcv1.WatchDeletionsRequest
	cluster Cluster

	mu    sync.Mutex
	table *render.Table
	// expected is the number of collectors in this round, opened the number of open watches, enforcing the number that delete.
	expected, opened, enforcing int
}

// watchDeletions prints until ctx ends, which is not an error. When a collector ends, it finds all collectors again.
func watchDeletions(ctx context.Context, c *cli, g collectors, in *gcv1.WatchDeletionsRequest) error {
	cluster, err := g.open(c)
	if err != nil {
		return err
	}
	w := &deletionWatcher{c: c, in: in, cluster: cluster, table: render.Deletions(c.settings.Output == "wide")}
	for reached := false; ; {
		found, err := findCollectors(ctx, c, cluster, g)
		if err == nil {
			err = w.round(ctx, found)
		}
		reached = reached || w.opened > 0
		if ctx.Err() != nil {
			return nil //nolint:nilerr // Ctrl-C is how a watch ends
		}
		if !reached || !errdefs.IsUnavailable(err) {
			return err
		}
		c.infof("finding garbage collectors again: %s", explain(err).message)
		select {
		case <-c.Clock.After(retries().Initial):
		case <-ctx.Done():
		}
	}
}

// round watches collectors until one of them ends.
func (w *deletionWatcher) round(ctx context.Context, found []tunnel.Pod) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// The progress line shows one call only.
	quiet := *w.c
	quiet.progress = &progress{w: w.c.Err, clock: w.c.Clock}
	w.expected, w.opened, w.enforcing = len(found), 0, 0
	results := make(chan error, len(found))
	for _, p := range found {
		go func() {
			results <- atCollector(ctx, &quiet, w.cluster, p, w.watch)
		}()
	}
	first := <-results
	cancel()
	for range len(found) - 1 {
		_ = <-results // ended by the cancel above
	}
	return first
}

// watch watches one collector until it ends.
func (w *deletionWatcher) watch(ctx context.Context, c *cli, client gcv1.GarbageCollectorServiceClient) error {
	status, err := call(ctx, c, "calling "+c.peer, func(ctx context.Context) (*gcv1.GetStatusResponse, error) {
		return client.GetStatus(ctx, &gcv1.GetStatusRequest{})
	})
	if err != nil {
		return err
	}
	stream, err := client.WatchDeletions(ctx, w.in)
	if err != nil {
		return c.classify(err)
	}
	// From the header on, every deletion is sent. Without a header the stream has ended.
	if header, err := stream.Header(); err == nil && header != nil {
		w.begin(status)
	}
	for {
		event, err := stream.Recv()
		if err != nil {
			return c.classify(ended(err))
		}
		if err := w.print(event); err != nil {
			return err
		}
	}
}

// begin reports, once all collectors are watched, that the watch has begun.
func (w *deletionWatcher) begin(status *gcv1.GetStatusResponse) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.opened++
	if status.GetEnforcing() {
		w.enforcing++
	}
	if w.opened < w.expected {
		return
	}
	where := "in all namespaces"
	if w.in.GetNamespace() != "" {
		where = "in namespace " + w.in.GetNamespace()
	}
	w.c.infof("watching deletions %s", where)
	if w.enforcing == 0 {
		w.c.infof("note: no garbage collector of Fast Sandbox deletes now; see fsb-ctl gc status")
	}
}

func (w *deletionWatcher) print(event *gcv1.WatchDeletionsResponse) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := event.GetMissed(); n > 0 {
		w.c.infof("note: %d deletions are missing because the client read too slowly", n)
	}
	if done, err := w.c.printNext(event); done {
		return err
	}
	if w.c.settings.Output == "name" {
		return printObjectNames(w.c, event.GetObject())
	}
	w.table.Add(render.DeletionRow(event, w.c.settings.Output == "wide")...)
	return w.table.Flush(w.c.Out)
}
