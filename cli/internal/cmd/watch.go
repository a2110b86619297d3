package cmd

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/transfer"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func newWatch(c *cli) *cobra.Command {
	s, files := &selection{}, &filesWatch{}
	cmd := &cobra.Command{
		Use:   "watch [NAME | NAME:PATH]",
		Short: "Watch sandboxes, or a directory of one, change",
		Long: `Print the present sandboxes and then every change, until Ctrl-C. With -o json each change is one line
{"type":...,"sandbox":{...}}. TYPE_SYNCED follows the present sandboxes.

NAME:PATH prints changes in a directory of a sandbox instead: CREATED, WRITTEN, REMOVED, MOVED and ATTRIBUTES with the path.
STARTED comes first: all later changes are printed. OVERFLOW says that changes were lost: read the directory again.`,
		Example: `  fsb-ctl watch
  fsb-ctl watch web -o json

  # a directory of a sandbox, with those in it
  fsb-ctl watch web:/var/log --recursive`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("one NAME or NAME:PATH at most, not %d", len(args))
			}
			return files.refused(cmd, len(args) == 1 && strings.Contains(args[0], ":"))
		},
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 && strings.Contains(args[0], ":") {
				at, err := transfer.Parse(args[0])
				if err == nil && at.Sandbox == "" {
					err = fmt.Errorf("%q is no path in a sandbox, as NAME:PATH", args[0])
				}
				if err != nil {
					return usageError{err}
				}
				return files.run(cmd.Context(), c, at)
			}
			list, err := s.request(c)
			if err != nil {
				return err
			}
			in := watchOf(list)
			if len(args) == 1 {
				in.Name = args[0]
			}
			return watchSandboxes(cmd.Context(), c, in, s.all, true)
		},
	}
	s.addFlags(c, cmd, true)
	files.addFlags(cmd)
	return cmd
}

func watchOf(in *sandboxv1.ListSandboxesRequest) *sandboxv1.WatchSandboxesRequest {
	return &sandboxv1.WatchSandboxesRequest{Namespace: in.GetNamespace(), Pool: in.GetPool(), LabelSelector: in.GetLabelSelector(), Phases: in.GetPhases()}
}

// watcher prints changes. It remembers what it has printed: if the stream has to be opened again, it repeats nothing and prints
// what was deleted in between.
type watcher struct {
	c       *cli
	columns render.Columns
	table   *render.Table
	known   map[string]*sandboxv1.Sandbox // by namespace/name/uid
	fresh   map[string]bool               // received on this stream
	synced  bool                          // whether this stream has sent SYNCED
	started bool                          // whether any stream has sent SYNCED
}

// watchSandboxes prints until ctx ends, which is not an error.
func watchSandboxes(ctx context.Context, c *cli, in *sandboxv1.WatchSandboxesRequest, namespaces, events bool) error {
	client, err := c.sandboxes()
	if err != nil {
		return err
	}
	columns := render.Columns{Event: events, Namespace: namespaces, Wide: c.settings.Output == "wide"}
	w := &watcher{c: c, columns: columns, table: render.Sandboxes(columns), known: map[string]*sandboxv1.Sandbox{}}
	for {
		err := w.once(ctx, client, in)
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // Ctrl-C is how a watch ends
		case errdefs.IsUnavailable(err) && w.synced, fault.ReasonOf(err) == fault.Overloaded && w.synced:
			// The stream worked before: open it again.
		default:
			return err
		}
	}
}

func (w *watcher) once(ctx context.Context, client sandboxv1.SandboxServiceClient, in *sandboxv1.WatchSandboxesRequest) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w.synced, w.fresh = false, map[string]bool{}
	type opened = begun[sandboxv1.WatchSandboxesResponse]
	b, err := call(ctx, w.c, "watching", func(callCtx context.Context) (opened, error) {
		return opening(ctx, callCtx, false, func(streamCtx context.Context) (opened, error) {
			stream, err := client.WatchSandboxes(streamCtx, in)
			if err != nil {
				return opened{}, err
			}
			first, err := stream.Recv()
			return opened{stream, first}, ended(err)
		})
	})
	if err != nil {
		return err
	}
	for event := b.first; ; {
		if err := w.take(event); err != nil {
			return err
		}
		if event, err = b.stream.Recv(); err != nil {
			return w.c.classify(ended(err))
		}
	}
}

func (w *watcher) take(event *sandboxv1.WatchSandboxesResponse) error {
	s := event.GetSandbox()
	key := s.GetNamespace() + "/" + s.GetName() + "/" + s.GetUid()
	switch event.GetType() {
	case sandboxv1.WatchSandboxesResponse_TYPE_SYNCED:
		return w.sync(event)
	case sandboxv1.WatchSandboxesResponse_TYPE_DELETED:
		delete(w.known, key)
	default:
		if old, ok := w.known[key]; ok && !w.synced {
			w.fresh[key] = true
			if render.PhaseWord(old) == render.PhaseWord(s) && render.Exit(old.GetStatus()) == render.Exit(s.GetStatus()) {
				return nil // printed on an earlier stream
			}
			event.Type = sandboxv1.WatchSandboxesResponse_TYPE_MODIFIED
		}
		w.known[key], w.fresh[key] = s, true
	}
	return w.print(event)
}

// sync prints what was deleted between two streams, and for programs that the present sandboxes are complete.
func (w *watcher) sync(event *sandboxv1.WatchSandboxesResponse) error {
	for _, key := range slices.Sorted(maps.Keys(w.known)) {
		if s := w.known[key]; !w.fresh[key] {
			delete(w.known, key)
			if err := w.print(&sandboxv1.WatchSandboxesResponse{Type: sandboxv1.WatchSandboxesResponse_TYPE_DELETED, Sandbox: s}); err != nil {
				return err
			}
		}
	}
	first := !w.started
	w.synced, w.started = true, true
	switch {
	case !w.c.machine():
		return w.table.Flush(w.c.Out)
	case first && w.c.settings.Output != "name":
		return w.print(event)
	default:
		return nil
	}
}

// print prints one change. Rows before the first SYNCED are collected, so that they share column widths.
func (w *watcher) print(event *sandboxv1.WatchSandboxesResponse) error {
	if done, err := w.c.printNext(event); done {
		return err
	}
	if w.c.settings.Output == "name" {
		return w.c.printNames("sandbox", event.GetSandbox().GetName())
	}
	word := strings.TrimPrefix(event.GetType().String(), "TYPE_")
	w.table.Add(render.Row(w.columns, word, event.GetSandbox(), w.c.Clock.Now())...)
	if !w.started {
		return nil
	}
	return w.table.Flush(w.c.Out)
}
