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

// settleTime is how long an interrupted create of `run --rm` may continue, so that a sandbox that it created is deleted.
const settleTime = 5 * time.Second

type runOptions struct {
	request                 requestOptions
	attach, rm, quiet, edit bool
	stdin, terminal         bool
	command                 []string // of -i and -t, which `exec` runs in a sandbox that is kept alive
}

func newRun(c *cli) *cobra.Command {
	o := &runOptions{}
	cmd := &cobra.Command{
		Use:   "run [NAME] --image IMAGE [flags] [-- COMMAND [ARG...]]",
		Short: "Run a sandbox",
		Long: `Run a sandbox and return when its process has started. Without NAME the server generates a name.

What follows -- replaces the image's entry point; with --keep-entrypoint it is the arguments of the entry point.
Standard output gets the name and then the endpoints, one on each line. Standard error gets the agent, whether the
sandbox claimed a started slot or took the cold path, and the time of each stage in milliseconds.

With --attach, the output of the process goes to standard output until the process ends, and fsb-ctl exits with its
exit code. Ctrl-C leaves the sandbox running. --rm is --attach, and deletes the sandbox at the end, also after Ctrl-C.

With -i or -t, the sandbox has no process of its own (--keep-alive), and the command runs in it as with "exec": -it gives it a terminal. fsb-ctl
exits with its exit code; the sandbox stays, unless --rm deletes it. After Ctrl-P Ctrl-Q it always stays.

--edit opens a commented manifest in $EDITOR. Flags override a manifest of --filename, which overrides the edited one.
If the file is unchanged or empty, nothing is created. If the sandbox is invalid, the editor opens again with the error.

While the server is unavailable, the call is repeated within --timeout with the same request id: it creates one sandbox.`,
		Example: `  # print 42
  fsb-ctl run py --image docker.io/library/python:3.13 --rm -- python3 -c 'print(6*7)'

  # a shell in a sandbox of its own
  fsb-ctl run -it --rm --image docker.io/library/busybox:1.37 -- sh

  # a server for ten minutes, with limits
  fsb-ctl run web --image docker.io/library/nginx --port 80 --ttl 10m --cpu 500m --memory 128Mi

  # a job whose record is deleted an hour after its end
  fsb-ctl run job --image docker.io/library/busybox:1.37 --ttl-after-finished 1h -- sh -c 'sleep 60'

  # from a Sandbox manifest, with another image
  fsb-ctl run -f sandbox.yaml --image docker.io/library/busybox:1.37

  # a sandbox for commands that come later
  fsb-ctl run box --image docker.io/library/python:3.13 --keep-alive
  fsb-ctl exec box -- python3 -c 'print(6*7)'

  # edit the manifest first
  fsb-ctl run --edit

  # a name for scripts
  name=$(fsb-ctl run -q --image docker.io/library/busybox:1.37 -- sleep 1d)`,
		RunE: func(cmd *cobra.Command, args []string) error {
			name, command, err := splitArgs(cmd, args)
			if err != nil {
				return err
			}
			return o.run(cmd, c, name, command)
		},
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	o.addFlags(c, cmd)
	return cmd
}

func (o *runOptions) addFlags(c *cli, cmd *cobra.Command) {
	o.request.addFlags(cmd.Flags())
	o.request.addCompletion(c, cmd)
	cmd.Flags().BoolVarP(&o.attach, "attach", "a", false, "print the output until the process ends, and exit with its exit code")
	cmd.Flags().BoolVar(&o.rm, "rm", false, "like --attach, and delete the sandbox at the end")
	cmd.Flags().BoolVarP(&o.stdin, "stdin", "i", false, "pass standard input on to the command, and exit with its exit code")
	cmd.Flags().BoolVarP(&o.terminal, "tty", "t", false, "give the command a terminal, and exit with its exit code")
	cmd.Flags().BoolVarP(&o.quiet, "quiet", "q", false, "print only the name, or with --attach the output")
	cmd.Flags().BoolVar(&o.edit, "edit", false, "edit a manifest of the sandbox in $EDITOR first")
}

// splitArgs separates NAME and COMMAND in `[NAME] -- COMMAND...`.
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

func (o *runOptions) run(cmd *cobra.Command, c *cli, name string, command []string) error {
	ctx := cmd.Context()
	if o.interactive() {
		if err := o.keepCommand(command); err != nil {
			return err
		}
		command = nil
	}
	if o.request.file != "" {
		var err error
		if o.request.content, err = readManifest(c, o.request.file); err != nil {
			return err
		}
	}
	if o.edit {
		return o.editRequest(ctx, c, cmd, name, command, func(ctx context.Context, in *sandboxv1.CreateSandboxRequest) error {
			return o.create(ctx, c, in)
		})
	}
	in, err := o.request.build(c, cmd.Flags(), name, command, nil)
	if err != nil {
		return err
	}
	return o.create(ctx, c, in)
}

// create creates the sandbox and, if asked for, attaches to it.
func (o *runOptions) create(ctx context.Context, c *cli, in *sandboxv1.CreateSandboxRequest) error {
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
	if !o.quiet {
		printTimings(c, out, c.Clock.Since(begin))
	}
	if o.interactive() {
		return o.enter(ctx, c, client, out.GetSandbox())
	}
	if !o.attach && !o.rm {
		return printCreated(c, out, o.quiet)
	}
	return attach(ctx, c, client, out.GetSandbox(), o.rm)
}

// outlive returns a context that ends some time after ctx ends. The returned function releases it and must be called.
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

// printCreated prints a new sandbox, for scripts.
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

// printTimings prints how the sandbox was created and the time of each stage.
func printTimings(c *cli, out *sandboxv1.CreateSandboxResponse, took time.Duration) {
	s := out.GetSandbox()
	how := strings.ToLower(strings.TrimPrefix(out.GetConsistencyMode().String(), "CONSISTENCY_MODE_"))
	if out.GetReplayed() {
		how += ", repeated request"
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
