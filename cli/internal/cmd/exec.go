package cmd

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/console"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
)

// execOptions are the flags of `exec`.
type execOptions struct {
	stdin, terminal, detach bool
	env                     []string
	workdir, user, tag      string
	limit                   time.Duration
	left                    bool // the user has detached
}

func newExec(c *cli) *cobra.Command {
	o := &execOptions{}
	cmd := &cobra.Command{
		Use:   "exec NAME [flags] -- COMMAND [ARG...]",
		Short: "Run a command in a sandbox",
		Long: `Run a command in a sandbox, and exit with its exit code.

Arguments are passed as they are; for a pipe or a variable, run a shell: -- sh -c '...'. The command has the variables, the user
and the working directory of the sandbox, unless flags say otherwise.

The command belongs to the sandbox: it runs on if fsb-ctl is ended or the connection breaks, and "attach" shows its output again.
Ctrl-C is sent to the command with -t, and ends the command's process group without it. With -it, Ctrl-P Ctrl-Q detaches.`,
		Example: `  # one command
  fsb-ctl exec web -- ls -l /srv

  # a shell
  fsb-ctl exec -it web -- sh

  # input from a file
  fsb-ctl exec -i web -- sh -c 'cat > /tmp/data' < data

  # in the background, and look at it later
  fsb-ctl exec -d --tag build web -- make
  fsb-ctl attach web build`,
		RunE: func(cmd *cobra.Command, args []string) error {
			name, command, err := splitArgs(cmd, args)
			switch {
			case err != nil:
				return err
			case name == "":
				return usagef("NAME is required")
			case len(command) == 0:
				return usagef("a COMMAND is required after --")
			}
			return o.run(cmd.Context(), c, name, command)
		},
		ValidArgsFunction: c.completeSandbox,
	}
	f := cmd.Flags()
	f.BoolVarP(&o.stdin, "stdin", "i", false, "pass standard input on")
	f.BoolVarP(&o.terminal, "tty", "t", false, "give the command a terminal; with -i from a terminal, keys are passed on as they are typed")
	f.BoolVarP(&o.detach, "detach", "d", false, "start the command, print its pid, and return")
	f.StringArrayVarP(&o.env, "env", "e", nil, "a variable, as `NAME=VALUE`; may be repeated")
	f.StringVarP(&o.workdir, "workdir", "w", "", "working `directory`")
	f.StringVarP(&o.user, "user", "u", "", "`user` or uid, with a group after a colon")
	f.StringVar(&o.tag, "tag", "", "a `name` for the command, which other commands can use instead of its pid")
	f.DurationVar(&o.limit, "limit", 0, "kill the command after this `duration`")
	for _, flag := range []string{"env", "workdir", "user", "tag", "limit"} {
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.NoFileCompletions)
	}
	return cmd
}

func (o *execOptions) request(c *cli, name string, command []string) (*processv1.StartProcessRequest, error) {
	spec := &processv1.ProcessSpec{Args: command, WorkingDir: o.workdir, User: o.user, Tag: o.tag, Env: map[string]string{}}
	for _, e := range o.env {
		key, value, ok := strings.Cut(e, "=")
		if !ok || key == "" {
			return nil, usagef("--env %q is not NAME=VALUE", e)
		}
		spec.Env[key] = value
	}
	if o.limit < 0 {
		return nil, usagef("--limit is %s, want more than 0", o.limit)
	}
	if o.limit > 0 {
		spec.Timeout = durationpb.New(o.limit)
	}
	in := &processv1.StartProcessRequest{Namespace: c.settings.Namespace, Name: name, Process: spec, Stdin: o.stdin}
	if o.terminal {
		in.Terminal = sizeNow(c)
	}
	return in, nil
}

// sizeNow is the size of the user's terminal, or that of the first ones.
func sizeNow(c *cli) *processv1.TerminalSize {
	rows, columns := console.Size(c.Out)
	if rows == 0 || columns == 0 {
		rows, columns = 24, 80
	}
	return &processv1.TerminalSize{Rows: int32(rows), Columns: int32(columns)}
}

func (o *execOptions) run(ctx context.Context, c *cli, name string, command []string) error {
	in, err := o.request(c, name, command)
	if err != nil {
		return err
	}
	client, err := c.processes()
	if err != nil {
		return err
	}
	s := &session{cli: c, client: client, name: name, stdin: o.stdin && !o.detach, terminal: o.terminal, kill: !o.detach}
	defer func() { o.left = s.left }()
	return s.run(ctx, func(ctx context.Context) (grpc.ServerStreamingClient[processv1.StartProcessResponse], error) {
		return client.StartProcess(ctx, in)
	}, o.detach)
}

// processes returns a client of the API for processes.
func (c *cli) processes() (processv1.ProcessServiceClient, error) {
	conn, err := c.connect()
	if err != nil {
		return nil, err
	}
	return processv1.NewProcessServiceClient(conn), nil
}
