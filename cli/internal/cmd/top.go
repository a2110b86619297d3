package cmd

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	// topInterval is the time between two readings with --watch, topWindow that without it, unless --interval is given.
	topInterval = 2 * time.Second
	topWindow   = time.Second
	// The bounds of --interval, which are those of the API.
	minInterval, maxInterval = 250 * time.Millisecond, 5 * time.Minute
)

// top shows what sandboxes use.
type top struct {
	cli       *cli
	client    usagev1.UsageServiceClient
	selection selection
	name      string // of the only sandbox; empty for all that are selected
	watch     bool
	sort      string
	interval  time.Duration
	rates     rates
	screen    screen
}

func newTop(c *cli) *cobra.Command {
	t := &top{cli: c, sort: sortCPU, interval: topInterval, rates: rates{}}
	cmd := &cobra.Command{
		Use:   "top [NAME]",
		Short: "Show what sandboxes use: processors, memory, processes",
		Long: `Show what running sandboxes use. CPU is the number of processors that a sandbox used on average between two readings, a second apart
unless --interval says otherwise. MEMORY is what the kernel cannot reclaim at once, PEAK the most it has been with all page cache. PROCESSES
includes threads. "<none>" is a figure that the node does not have, as the network of sandboxes that share that of their agent.

With --watch the table is replaced on a terminal, and repeated in a pipe, until Ctrl-C or the end of the sandbox NAME. With -o json and yaml, the
figures are counters and each has the time of its reading; with --watch, each reading is one line or document {"usage":{...}}.`,
		Example: `  fsb-ctl top
  fsb-ctl top web --watch
  fsb-ctl top -A --sort memory -o wide
  fsb-ctl top -l team=red -w --interval 500ms`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("unexpected argument %q: one NAME at most", args[1])
			}
			return nil
		},
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := t.prepare(cmd, args); err != nil {
				return err
			}
			return t.run(cmd.Context())
		},
	}
	t.selection.addFlags(c, cmd, false)
	fs := cmd.Flags()
	fs.BoolVarP(&t.selection.all, "all-namespaces", "A", false, "sandboxes of all namespaces")
	fs.BoolVarP(&t.watch, "watch", "w", false, "continue until Ctrl-C")
	fs.StringVar(&t.sort, "sort", t.sort, "order: "+strings.Join(sorts(), ", "))
	fs.DurationVar(&t.interval, "interval", t.interval, "`time` between two readings, 250ms to 5m; without --watch 1s unless it is given")
	_ = cmd.RegisterFlagCompletionFunc("sort", cobra.FixedCompletions(sorts(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// prepare checks the command line and connects.
func (t *top) prepare(cmd *cobra.Command, args []string) error {
	switch {
	case !slices.Contains(sorts(), t.sort):
		return usagef("--sort is %q, want one of %s", t.sort, strings.Join(sorts(), ", "))
	case t.interval < minInterval || t.interval > maxInterval:
		return usagef("--interval is %s, want %s to %s", t.interval, minInterval, maxInterval)
	case len(args) == 1 && (t.selection.all || t.selection.selector != "" || t.selection.pool != ""):
		return usagef("NAME excludes --all-namespaces, --selector and --pool")
	case !t.watch && !cmd.Flags().Changed("interval"):
		t.interval = topWindow
	}
	if len(args) == 1 {
		t.name = args[0]
	}
	conn, err := t.cli.connect()
	if err != nil {
		return err
	}
	t.client, t.screen = usagev1.NewUsageServiceClient(conn), newScreen(t.cli.Out)
	return nil
}

func (t *top) run(ctx context.Context) error {
	switch {
	case t.watch && t.name != "":
		return t.follow(ctx)
	case t.watch:
		return t.repeat(ctx)
	}
	list, missing, err := t.read(ctx)
	if err != nil {
		return err
	}
	if !t.cli.machine() && len(list) > 0 {
		t.rates.add(list)
		if !t.wait(ctx) {
			return ctx.Err()
		}
		if list, missing, err = t.read(ctx); err != nil {
			return err
		}
	}
	if err := t.print(list); err != nil {
		return err
	}
	for _, m := range missing {
		t.cli.infof("%s", m)
	}
	if len(missing) > 0 {
		return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the sandboxes of %d agents are missing", len(missing))
	}
	return nil
}

// wait waits for the interval; false means that ctx has ended.
func (t *top) wait(ctx context.Context) bool {
	timer := t.cli.Clock.NewTimer(t.interval)
	defer timer.Stop()
	select {
	case <-timer.C():
		return true
	case <-ctx.Done():
		return false
	}
}

// read returns what the sandboxes use, and which of them are missing.
func (t *top) read(ctx context.Context) (list []*usagev1.SandboxUsage, missing []string, err error) {
	if t.name != "" {
		resp, err := call(ctx, t.cli, "reading the usage of "+t.name, func(ctx context.Context) (*usagev1.GetSandboxUsageResponse, error) {
			return t.client.GetSandboxUsage(ctx, &usagev1.GetSandboxUsageRequest{Namespace: t.cli.settings.Namespace, Name: t.name})
		})
		return []*usagev1.SandboxUsage{resp.GetUsage()}, nil, err
	}
	wanted, err := t.wanted(ctx)
	if err != nil {
		return nil, nil, err
	}
	in := &usagev1.ListSandboxUsageRequest{Namespace: t.cli.settings.Namespace, Pool: t.selection.pool}
	if t.selection.all {
		in.Namespace = ""
	}
	messages, err := call(ctx, t.cli, "reading the usage of sandboxes", func(ctx context.Context) ([]*usagev1.ListSandboxUsageResponse, error) {
		stream, err := t.client.ListSandboxUsage(ctx, in)
		if err != nil {
			return nil, err
		}
		return all(stream)
	})
	for _, m := range messages {
		for _, s := range m.GetSandboxes() {
			if wanted == nil || wanted[s.GetUid()] {
				list = append(list, s)
			}
		}
		if m.GetError() != "" {
			missing = append(missing, fmt.Sprintf("agent %s on node %s: %s", m.GetAgentPod(), m.GetNodeName(), m.GetError()))
		}
	}
	slices.Sort(missing)
	return list, missing, err
}

// wanted returns the uids of the sandboxes that the selector matches; nil without a selector.
func (t *top) wanted(ctx context.Context) (map[string]bool, error) {
	if t.selection.selector == "" {
		return nil, nil //nolint:nilnil // all are
	}
	in, err := t.selection.request(t.cli)
	if err != nil {
		return nil, err
	}
	list, err := t.cli.listAll(ctx, in)
	uids := map[string]bool{}
	for _, s := range list {
		uids[s.GetUid()] = true
	}
	return uids, err
}

// repeat shows all sandboxes until ctx ends.
func (t *top) repeat(ctx context.Context) error {
	for {
		list, missing, err := t.read(ctx)
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // Ctrl-C is how it ends
		case err != nil:
			return err
		}
		if err := t.next(list, missing...); err != nil {
			return err
		}
		if !t.wait(ctx) {
			return nil
		}
	}
}

// follow shows one sandbox until it or ctx ends.
func (t *top) follow(ctx context.Context) error {
	in := &usagev1.WatchSandboxUsageRequest{Namespace: t.cli.settings.Namespace, Name: t.name, Interval: durationpb.New(t.interval)}
	for {
		ended, worked, err := t.stream(ctx, in)
		switch {
		case ctx.Err() != nil, ended:
			return nil //nolint:nilerr // Ctrl-C is how it ends
		case errdefs.IsUnavailable(err) && worked:
			// The stream worked before: open it again.
		default:
			return err
		}
	}
}

// stream shows what one stream sends. It reports whether the sandbox has ended, and whether the stream has worked.
func (t *top) stream(ctx context.Context, in *usagev1.WatchSandboxUsageRequest) (end, worked bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	b, err := openStream(ctx, t.cli, "watching the usage of "+t.name, func(ctx context.Context) (grpc.ServerStreamingClient[usagev1.WatchSandboxUsageResponse], error) {
		return t.client.WatchSandboxUsage(ctx, in)
	})
	if err != nil {
		return false, false, err
	}
	for m := b.first; ; {
		if e := m.GetEnded(); e != nil {
			return true, true, t.ended(m)
		}
		if err := t.next([]*usagev1.SandboxUsage{m.GetUsage()}); err != nil {
			return false, false, err
		}
		if m, err = b.stream.Recv(); err != nil {
			return false, true, t.cli.classify(ended(err))
		}
	}
}

// ended reports the end of the sandbox.
func (t *top) ended(m *usagev1.WatchSandboxUsageResponse) error {
	if done, err := t.cli.printNext(m); done {
		return err
	}
	e := m.GetEnded()
	t.cli.infof("sandbox %s has ended: %s", t.name, cmp.Or(e.GetMessage(), e.GetReason(), "it was deleted"))
	return nil
}
