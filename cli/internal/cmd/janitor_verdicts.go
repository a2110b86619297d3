package cmd

import (
	"context"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
)

func newJanitorVerdicts(c *cli, j *janitors) *cobra.Command {
	f, watch := &verdictFilter{}, false
	cmd := &cobra.Command{
		Use: "verdicts", Aliases: []string{"verdict", "list", "ls"},
		Short: "Show the verdicts of the janitors and their reasons",
		Long: `Show the verdict of the janitors on each container of Fast Sandbox and on each remnant: Keep, Wait (not decided yet) or
Delete, with the reason. -o wide shows the evidence, -o json and -o yaml all of it.

A verdict is based on the present knowledge of the janitor. Before a deletion, the janitor checks it against the API server;
"sweep --dry-run" does that too.`,
		Example: `  fsb-ctl janitor verdicts
  fsb-ctl janitor verdicts --node worker-3 --action delete,wait -o wide
  fsb-ctl janitor verdicts --reason agent-pod-gone -o json
  fsb-ctl janitor verdicts --node worker-3 -w`,
		Args:              exactly(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			actions, reasons, err := f.parse()
			if err != nil {
				return err
			}
			if watch {
				return watchVerdicts(cmd.Context(), c, *j, &janitorv1.WatchVerdictsRequest{Actions: actions, Reasons: reasons})
			}
			return listVerdicts(cmd.Context(), c, *j, &janitorv1.ListVerdictsRequest{Actions: actions, Reasons: reasons})
		},
	}
	cmd.Flags().StringSliceVar(&f.actions, "action", nil, "only these `actions`: "+strings.Join(render.VerdictActions(), ", "))
	_ = cmd.RegisterFlagCompletionFunc("action", cobra.FixedCompletions(render.VerdictActions(), cobra.ShellCompDirectiveNoFileComp))
	f.addReasons(cmd, "only these `reasons`: "+strings.Join(render.VerdictReasons(), ", "))
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "continue with changes, until Ctrl-C; on one node only")
	return cmd
}

// listVerdicts prints the verdicts of the janitors that answer. It returns the first error of the others.
func listVerdicts(ctx context.Context, c *cli, j janitors, in *janitorv1.ListVerdictsRequest) error {
	var all []*janitorv1.Verdict
	failed := eachJanitor(ctx, c, j, func(ctx context.Context, c *cli, client janitorv1.JanitorServiceClient) error {
		out, err := call(ctx, c, "calling "+c.peer, func(ctx context.Context) (*janitorv1.ListVerdictsResponse, error) {
			return client.ListVerdicts(ctx, in)
		})
		all = append(all, out.GetVerdicts()...)
		return err
	})
	if failed != nil && len(all) == 0 {
		return failed
	}
	if err := printVerdicts(c, all); err != nil {
		return err
	}
	return failed
}

func printVerdicts(c *cli, all []*janitorv1.Verdict) error {
	if done, err := printList(c, "verdicts", all); done {
		return err
	}
	if c.settings.Output == "name" {
		return c.printNames("container", verdictIDs(all)...)
	}
	if len(all) == 0 {
		c.infof("no verdicts found")
		return nil
	}
	columns := render.Columns{Wide: c.settings.Output == "wide"}
	t := render.Verdicts(columns)
	for _, v := range all {
		t.Add(render.VerdictRow(columns, "", v)...)
	}
	return t.Flush(c.Out)
}

func verdictIDs(all []*janitorv1.Verdict) []string {
	ids := make([]string, len(all))
	for i, v := range all {
		ids[i] = v.GetContainerId()
	}
	return ids
}

// watchVerdicts prints until ctx ends, which is not an error.
func watchVerdicts(ctx context.Context, c *cli, j janitors, in *janitorv1.WatchVerdictsRequest) error {
	cluster, found, err := findJanitors(ctx, c, j)
	if err != nil {
		return err
	}
	if len(found) > 1 {
		return usagef("--watch is for one node and there are %d janitors: --node is required", len(found))
	}
	err = atJanitor(ctx, c, cluster, found[0], func(ctx context.Context, c *cli, client janitorv1.JanitorServiceClient) error {
		w := &verdictWatcher{c: c, columns: render.Columns{Event: true, Wide: c.settings.Output == "wide"}}
		w.table = render.Verdicts(w.columns)
		o, err := openStream(ctx, c, "watching "+c.peer, func(ctx context.Context) (grpc.ServerStreamingClient[janitorv1.WatchVerdictsResponse], error) {
			return client.WatchVerdicts(ctx, in)
		})
		for event := o.first; err == nil; event, err = o.stream.Recv() {
			if err := w.print(event); err != nil {
				return err
			}
		}
		return c.classify(ended(err))
	})
	if ctx.Err() != nil {
		return nil //nolint:nilerr // Ctrl-C is how a watch ends
	}
	return err
}

// verdictWatcher prints changes.
type verdictWatcher struct {
	c       *cli
	columns render.Columns
	table   *render.Table
	synced  bool
}

// print prints one change. Rows before SYNCED are collected, so that they share column widths.
func (w *verdictWatcher) print(event *janitorv1.WatchVerdictsResponse) error {
	synced := event.GetType() == janitorv1.WatchVerdictsResponse_TYPE_SYNCED
	w.synced = w.synced || synced
	if done, err := w.c.printNext(event); done {
		return err
	}
	if w.c.settings.Output == "name" {
		if synced {
			return nil
		}
		return w.c.printNames("container", event.GetVerdict().GetContainerId())
	}
	if !synced {
		w.table.Add(render.VerdictRow(w.columns, strings.TrimPrefix(event.GetType().String(), "TYPE_"), event.GetVerdict())...)
	}
	if !w.synced {
		return nil
	}
	return w.table.Flush(w.c.Out)
}
