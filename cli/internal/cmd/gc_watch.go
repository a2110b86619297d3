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
		Short: "Show what the garbage collector deletes, as it does, and why",
		Long: `Show each deletion that the garbage collector makes from now on in the namespace of -n, or with -A in all of them and of
objects outside of namespaces, until Ctrl-C. What others delete is not shown. All replicas are watched: the one that deletes
may change.`,
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
	cmd.Flags().BoolVarP(&all, "all-namespaces", "A", false, "deletions everywhere")
	return cmd
}

// deletionWatcher prints what several collectors tell.
type deletionWatcher struct {
	c       *cli
	in      *gcv1.WatchDeletionsRequest
	cluster Cluster

	mu    sync.Mutex
	table *render.Table
	// expected collectors are watched in this round, opened of them have been reached, enforcing of these delete.
	expected, opened, enforcing int
}

// watchDeletions prints until ctx ends, which is no error. When a collector ends, all are looked for anew.
func watchDeletions(ctx context.Context, c *cli, g collectors, in *gcv1.WatchDeletionsRequest) error {
	cluster, err := clusterOf(c, g)
	if err != nil {
		return err
	}
	w := &deletionWatcher{c: c, in: in, cluster: cluster, table: render.Deletions(c.settings.Output == "wide")}
	for ever := false; ; {
		found, err := findCollectors(ctx, c, cluster, g)
		if err == nil {
			err = w.round(ctx, found)
		}
		ever = ever || w.opened > 0
		if ctx.Err() != nil {
			return nil //nolint:nilerr // Ctrl-C is how a watch ends
		}
		if !ever || !errdefs.IsUnavailable(err) {
			return err
		}
		c.infof("looking for garbage collectors anew: %s", explain(err).message)
		select {
		case <-c.Clock.After(retryFirst):
		case <-ctx.Done():
		}
	}
}

// round watches collectors until one of them ends.
func (w *deletionWatcher) round(ctx context.Context, found []tunnel.Pod) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Several at once have no progress to show.
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
		_ = <-results // they were ended by this one
	}
	return first
}

// watch watches one collector until it ends.
func (w *deletionWatcher) watch(ctx context.Context, c *cli, client gcv1.GarbageCollectorServiceClient) error {
	status, err := call(ctx, c, "asking "+c.peer, func(ctx context.Context) (*gcv1.GetStatusResponse, error) {
		return client.GetStatus(ctx, &gcv1.GetStatusRequest{})
	})
	if err != nil {
		return err
	}
	stream, err := client.WatchDeletions(ctx, w.in)
	if err != nil {
		return c.classify(err)
	}
	// The header comes when nothing is missed any more; without one the stream has ended.
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

// begin tells a person, once all collectors are watched, that the silence means something.
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
	where := "everywhere"
	if w.in.GetNamespace() != "" {
		where = "in namespace " + w.in.GetNamespace()
	}
	w.c.infof("watching deletions %s", where)
	if w.enforcing == 0 {
		w.c.infof("note: no garbage collector of ours deletes now: fsb-ctl gc status")
	}
}

func (w *deletionWatcher) print(event *gcv1.WatchDeletionsResponse) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := event.GetMissed(); n > 0 {
		w.c.infof("note: %d deletions came too fast and are missing here", n)
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
