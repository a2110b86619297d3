// Package cmd is fsb-ctl: one file for each command, and the connection, retries, progress, error messages and exit codes that
// they share. Commands call the allocator; those about janitors, garbage collectors and agents reach them through the API
// server. It keeps no state between commands. Main runs once in a process, and one command at a time.
package cmd

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/config"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// flushTimeout bounds the export of the trace at the end, in case the trace collector is unavailable.
const flushTimeout = time.Second

// Env is the process around a command.
type Env struct {
	// Name is the name of the executable, Version its version.
	Name, Version string
	// In, Out and Err are the standard streams. Terminal reports whether Err is a terminal.
	In       io.Reader
	Out, Err io.Writer
	Terminal bool
	// Clock is the time.
	Clock clock.WithTicker
	// Getenv reads the environment.
	Getenv func(string) string
	// DefaultConfigFile is read if it exists and no other file is set.
	DefaultConfigFile string
	// Cluster returns the Kubernetes cluster, for the commands that need it.
	Cluster func(tunnel.Options) (Cluster, error)
	// Setup is obs.Setup. Tests replace it, because it changes the whole process.
	Setup func(context.Context, obs.Options) (context.Context, func(context.Context) error, error)
}

// cli is the state that the parts of one command share.
type cli struct {
	Env
	settings  *config.Settings
	verbosity int
	conn      *grpc.ClientConn
	peer      string // name of the server, if it is not the allocator
	connected bool   // whether the server has answered a call
	progress  *progress
	flush     func(context.Context) error
	span      trace.Span
}

// Main runs one command line and returns the exit code of the process.
func Main(ctx context.Context, env Env, args []string) int {
	if plugin, ok := strings.CutPrefix(env.Name, completionPrefix); ok { // as kubectl asks a plugin for completions
		env.Name, args = "kubectl-"+plugin, append([]string{cobra.ShellCompRequestCmd}, args...)
	}
	c := &cli{Env: env}
	c.progress = &progress{w: env.Err, clock: env.Clock, on: env.Terminal}
	root := c.root()
	root.SetArgs(args)
	root.SetIn(env.In)
	root.SetOut(env.Out)
	root.SetErr(env.Err)
	ran, err := root.ExecuteContextC(ctx)
	c.close(ctx, err)
	return c.report(ctx, ran.CommandPath(), err)
}

func (c *cli) root() *cobra.Command {
	name := c.Name
	annotations := map[string]string{}
	if name != c.program() {
		annotations[cobra.CommandDisplayNameAnnotation] = c.program()
	}
	root := &cobra.Command{
		Use: name, Annotations: annotations, Version: c.Version,
		Short: "Run sandboxes: isolated containers that start in milliseconds",
		Long: `Run and manage sandboxes: isolated containers that start in milliseconds on Kubernetes.

Settings are taken from flags, then from the environment (FSB_ADDR, FSB_CACERT, FSB_CERT, FSB_KEY, FSB_NAMESPACE,
FSB_POOL, FSB_OUTPUT, FSB_TIMEOUT, FSB_INSECURE), then from a YAML file (FSB_CONFIG) with the keys addr, cacert, cert, key,
namespace, pool, output, timeout, insecure. "config view" shows each value and its source.

Exit codes:
` + exitCodesHelp(),
		Example: `  # run a command in a sandbox, print its output, and delete the sandbox
  fsb-ctl run py --image docker.io/library/python:3.13 --rm -- python3 -c 'print(6*7)'

  # start a server and list the sandboxes
  fsb-ctl run web --image docker.io/library/nginx --port 80
  fsb-ctl list -o wide`,
		SilenceUsage: true, SilenceErrors: true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return c.prepare(cmd) },
		Args:              cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q", args[0])
			}
			return cmd.Help()
		},
	}
	config.AddFlags(root.PersistentFlags())
	root.PersistentFlags().CountVarP(&c.verbosity, "verbose", "v", "verbosity: -v prints the trace id, -vv details, -vvvv debug messages")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.SetVersionTemplate("{{.Version}}\n")
	root.AddGroup(&cobra.Group{ID: groupSandbox, Title: "Sandboxes:"}, &cobra.Group{ID: groupMesh, Title: "Pools, images, agents, nodes and garbage collection:"})
	c.addSandboxCommands(root, groupSandbox)
	for _, sub := range []*cobra.Command{newPool(c), newImage(c), newAgents(c), newJanitor(c), newGC(c)} {
		sub.GroupID = groupMesh
		root.AddCommand(sub)
	}
	group := &cobra.Command{
		Use: "sandbox", Aliases: []string{"sandboxes", "sb", "sbx"}, Short: "The sandbox commands by their long names",
		Long: "The sandbox commands by their long names: `fsb-ctl sandbox update NAME --reset`.", Example: "  fsb-ctl sandbox list", Hidden: true,
		Args: cobra.ArbitraryArgs, RunE: root.RunE,
	}
	c.addSandboxCommands(group, "")
	root.AddCommand(group, newAuth(c), newAPIKey(c), newConfig(c), newVersion(c))
	c.rename(root)
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "wide", "json", "yaml", "name"}, cobra.ShellCompDirectiveNoFileComp))
	return root
}

const (
	groupSandbox = "sandbox"
	groupMesh    = "mesh"
)

func (c *cli) addSandboxCommands(parent *cobra.Command, group string) {
	for _, sub := range []*cobra.Command{
		newRun(c), newExec(c), newAttach(c), newPs(c), newKill(c), newCp(c), newPortForward(c), newTop(c),
		newGet(c), newList(c), newDescribe(c), newLogs(c), newTrace(c), newWatch(c), newUpdate(c), newDelete(c),
	} {
		sub.GroupID = group
		parent.AddCommand(sub)
	}
}

// prepare loads the settings and starts the trace. It runs before every command.
func (c *cli) prepare(cmd *cobra.Command) error {
	settings, err := config.Load(cmd.Flags(), c.Getenv, c.DefaultConfigFile)
	if err != nil {
		return usageError{err}
	}
	if settings.Output == outputDot && cmd.Annotations[dotAnnotation] == "" {
		return usagef("output is %q, which is for graphs only", outputDot)
	}
	c.settings = settings
	logs := io.Discard
	if c.verbosity > 1 {
		logs = c.Err
	}
	ctx, flush, err := c.Setup(cmd.Context(), obs.Options{Service: "fsb-ctl", Version: c.Version, Verbosity: c.verbosity, Output: logs})
	if err != nil {
		return err
	}
	c.flush = flush
	ctx = obs.WithTraceparent(ctx, c.Getenv("TRACEPARENT"))
	ctx, c.span = obs.Tracer().Start(ctx, strings.TrimSpace("fsb-ctl "+commandPath(cmd)), trace.WithSpanKind(trace.SpanKindInternal))
	if c.verbosity > 0 {
		fmt.Fprintf(c.Err, "trace %s\n", c.span.SpanContext().TraceID())
	}
	cmd.SetContext(ctx)
	return nil
}

// commandPath returns the words of a command without the name of the program.
func commandPath(cmd *cobra.Command) string {
	_, path, _ := strings.Cut(strings.TrimPrefix(cmd.CommandPath(), "kubectl "), " ")
	return path
}

func (c *cli) close(ctx context.Context, err error) {
	c.progress.stop()
	if c.span != nil {
		if err != nil {
			c.span.SetStatus(codes.Error, err.Error())
		}
		c.span.End()
	}
	if c.conn != nil {
		_ = c.conn.Close()
	}
	if c.flush != nil {
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
		defer cancel()
		if err := c.flush(stop); err != nil && c.verbosity > 0 {
			fmt.Fprintf(c.Err, "exporting the trace: %v\n", err)
		}
	}
}

// infof prints a message for people to standard error.
func (c *cli) infof(format string, args ...any) {
	c.progress.pause()
	fmt.Fprintf(c.Err, format+"\n", args...)
}
