package cmd

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// settleTime is how long an interrupted create of `run --rm` may go on, so that what it made can be deleted.
const settleTime = 5 * time.Second

type runOptions struct {
	request           requestOptions
	attach, rm, quiet bool
}

func newRun(c *cli) *cobra.Command {
	o := &runOptions{}
	cmd := &cobra.Command{
		Use:   "run [NAME] --image IMAGE [flags] [-- COMMAND [ARG...]]",
		Short: "Run a sandbox",
		Long: `Run a sandbox, and return once its process has started. Without NAME the server makes one up.

What follows -- is the command, in the place of the image's own entry point (--keep-entrypoint: its arguments).
Standard output gets the name and then the endpoints, one on each line; standard error tells where it runs, whether it
claimed a started slot or took the cold path, and where the time went, in milliseconds.

With --attach the process's output goes to standard output until it ends, and its exit code becomes that of fsb-ctl;
Ctrl-C leaves the sandbox running. --rm is --attach and deletes the sandbox in the end, also on Ctrl-C.

The call is repeated while the server is unavailable, within --timeout, under one request id: it makes one sandbox.`,
		Example: `  # see 42
  fsb-ctl run py --image docker.io/library/python:3.13 --rm -- python3 -c 'print(6*7)'

  # a server for ten minutes, with limits
  fsb-ctl run web --image docker.io/library/nginx --port 80 --ttl 10m --cpu 500m --memory 128Mi

  # from a Sandbox manifest, with another image
  fsb-ctl run -f sandbox.yaml --image docker.io/library/busybox:1.37

  # a name for scripts
  name=$(fsb-ctl run -q --image docker.io/library/busybox:1.37 -- sleep 1d)`,
		RunE: func(cmd *cobra.Command, args []string) error {
			name, command, err := splitArgs(cmd, args)
			if err != nil {
				return err
			}
			return c.run(cmd, o, name, command)
		},
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	o.request.addFlags(cmd.Flags())
	cmd.Flags().BoolVarP(&o.attach, "attach", "a", false, "follow the output until the process ends, and exit with its code")
	cmd.Flags().BoolVar(&o.rm, "rm", false, "like --attach, and delete the sandbox in the end")
	cmd.Flags().BoolVarP(&o.quiet, "quiet", "q", false, "print nothing but the name, or with --attach the output")
	_ = cmd.RegisterFlagCompletionFunc("pool", c.completePools)
	return cmd
}

// splitArgs parts `[NAME] -- COMMAND...`.
func splitArgs(cmd *cobra.Command, args []string) (string, []string, error) {
	own, command := args, []string(nil)
	if dash := cmd.ArgsLenAtDash(); dash >= 0 {
		own, command = args[:dash], args[dash:]
	}
	switch len(own) {
	case 0:
		return "", command, nil
	case 1:
		return own[0], command, nil
	default:
		return "", nil, usagef("one NAME at most, not %d: put -- before the command to run", len(own))
	}
}

func (c *cli) run(cmd *cobra.Command, o *runOptions, name string, command []string) error {
	ctx := cmd.Context()
	in, err := o.request.build(c, cmd.Flags(), name, command)
	if err != nil {
		return err
	}
	client, err := c.sandboxes()
	if err != nil {
		return err
	}
	if in.RequestId == "" {
		in.RequestId = uuid.NewString()
	}
	createCtx, settled := ctx, func() {}
	if o.rm {
		createCtx, settled = outlive(ctx, c, settleTime)
	}
	begin := c.Clock.Now()
	out, err := call(createCtx, c, "starting "+in.GetSpec().GetImage(), func(ctx context.Context) (*sandboxv1.CreateSandboxResponse, error) {
		return client.CreateSandbox(ctx, in)
	})
	settled()
	if err != nil {
		return err
	}
	took := c.Clock.Since(begin)
	if !o.quiet {
		timings(c, out, took)
	}
	if !o.attach && !o.rm {
		return printCreated(c, out, o.quiet)
	}
	return attach(ctx, c, client, out.GetSandbox(), o)
}

// outlive returns a context that ends some time after ctx does. The returned function ends it and must be called.
func outlive(ctx context.Context, c *cli, by time.Duration) (context.Context, func()) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-longer.Done():
			return
		case <-ctx.Done():
		}
		timer := c.Clock.NewTimer(by)
		defer timer.Stop()
		select {
		case <-longer.Done():
		case <-timer.C():
			cancel()
		}
	}()
	return longer, func() { cancel(); <-done }
}

// printCreated writes what scripts want to know of a new sandbox.
func printCreated(c *cli, out *sandboxv1.CreateSandboxResponse, quiet bool) error {
	if done, err := c.print(out); done {
		return err
	}
	s := out.GetSandbox()
	switch c.settings.Output {
	case "name":
		return c.printNames("sandbox", s.GetName())
	case "wide", "table":
		return c.printSandbox(s)
	}
	lines := []string{s.GetName()}
	if !quiet {
		lines = append(lines, out.GetEndpoints()...)
	}
	_, err := fmt.Fprintln(c.Out, strings.Join(lines, "\n"))
	return err
}

// timings tells which way the create went, and where the time went.
func timings(c *cli, out *sandboxv1.CreateSandboxResponse, took time.Duration) {
	s := out.GetSandbox()
	how := strings.ToLower(strings.TrimPrefix(out.GetConsistencyMode().String(), "CONSISTENCY_MODE_"))
	if out.GetReplayed() {
		how += ", answered before"
	}
	c.infof("sandbox %q started on %s (node %s, %s)", s.GetName(), orNone(s.GetStatus().GetAssignedPod()), orNone(s.GetStatus().GetNodeName()), how)
	c.infof("%s", render.Started(out, took))
}

func orNone(s string) string {
	if s == "" {
		return render.None
	}
	return s
}
