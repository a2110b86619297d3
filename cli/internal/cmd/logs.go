package cmd

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// logsOptions are the flags of `logs`.
type logsOptions struct {
	follow, direct bool
	tail           int64
	since          time.Duration
	cluster        clusterOptions
}

func newLogs(c *cli) *cobra.Command {
	o := &logsOptions{}
	cmd := &cobra.Command{
		Use:   "logs NAME",
		Short: "Print the output of a sandbox",
		Long: `Print what the process of a sandbox wrote to its standard output and standard error, byte for byte.

The output comes through the allocator. With --direct it comes from the agent, through the Kubernetes API server, as with
"kubectl port-forward": a large log is no load for the allocator, which only gives a ticket for it. The user of the kubeconfig
must be allowed to port-forward to Pods in the namespace.`,
		Example: `  fsb-ctl logs web
  fsb-ctl logs web -f --tail 20
  fsb-ctl logs web --since 5m

  # from the agent
  fsb-ctl logs web --direct`,
		Args:              exactly("NAME"),
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			in, err := o.request(c, cmd, args[0])
			if err != nil {
				return err
			}
			if o.direct {
				return o.runDirect(cmd.Context(), c, in)
			}
			client, err := c.sandboxes()
			if err != nil {
				return err
			}
			return copyLogs(cmd.Context(), c, in, publicLogs(client, in))
		},
	}
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "continue until the process has ended")
	cmd.Flags().Int64Var(&o.tail, "tail", 0, "only the last `lines` (default: all that is kept)")
	cmd.Flags().DurationVar(&o.since, "since", 0, "only what was written within this `duration`: 30s, 5m")
	cmd.Flags().BoolVar(&o.direct, "direct", false, "read from the agent, by a port-forward, instead of the allocator")
	o.cluster.addFlags(cmd, cmd.Flags())
	return cmd
}

// request returns the request that the flags describe.
func (o *logsOptions) request(c *cli, cmd *cobra.Command, name string) (*sandboxv1.StreamLogsRequest, error) {
	in := &sandboxv1.StreamLogsRequest{Namespace: c.settings.Namespace, Name: name, Follow: o.follow}
	if cmd.Flags().Changed("tail") {
		if o.tail < 0 {
			return nil, usagef("--tail is %d, want 0 or more", o.tail)
		}
		in.TailLines = &o.tail
	}
	if cmd.Flags().Changed("since") {
		if o.since <= 0 {
			return nil, usagef("--since is %s, want more than 0", o.since)
		}
		in.Since = timestamppb.New(c.Clock.Now().Add(-o.since))
	}
	return in, nil
}

// logSource opens a stream of output. next returns its pieces, and io.EOF at the end.
type logSource func(context.Context) (next func() ([]byte, error), err error)

// publicLogs reads from the public API.
func publicLogs(client sandboxv1.SandboxServiceClient, in *sandboxv1.StreamLogsRequest) logSource {
	return func(ctx context.Context) (func() ([]byte, error), error) {
		stream, err := client.StreamLogs(ctx, in)
		return pieces(stream), err
	}
}

// pieces returns the function that receives the next piece of a stream.
func pieces[T any, M interface {
	*T
	GetData() []byte
}](stream grpc.ServerStreamingClient[T]) func() ([]byte, error) {
	return func() ([]byte, error) {
		m, err := stream.Recv()
		return M(m).GetData(), err
	}
}

// copyLogs copies the output of a sandbox until the stream ends. A broken stream is opened again, within the timeout, and what
// was printed is skipped. That is not possible if the request selects a part of the output: then the break is an error if
// something was printed. The duration of the stream itself is not bounded.
func copyLogs(ctx context.Context, c *cli, in *sandboxv1.StreamLogsRequest, source logSource) error {
	var printed int64
	whole := in.TailLines == nil && in.GetSince() == nil
	for {
		before := printed
		err := copyOnce(ctx, c, in.GetFollow(), source, &printed)
		broken := err != nil && ctx.Err() == nil && errdefs.IsUnavailable(err)
		if !broken || printed == before || !whole {
			return err
		}
	}
}

// copyOnce copies one stream.
func copyOnce(ctx context.Context, c *cli, follow bool, source logSource, printed *int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	next, data, err := openLogs(ctx, c, follow, source)
	for skip := *printed; err == nil; data, err = next() {
		dropped := min(skip, int64(len(data)))
		skip -= dropped
		n, writeErr := c.Out.Write(data[dropped:])
		if *printed += int64(n); writeErr != nil {
			return writeErr
		}
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return c.classify(err)
}

// openLogs opens a stream and returns its first piece, or io.EOF. With follow it waits for the first piece without a bound.
func openLogs(ctx context.Context, c *cli, follow bool, source logSource) (next func() ([]byte, error), first []byte, err error) {
	doing := "reading the output"
	if follow {
		doing = "" // the process may be silent
	}
	ended := false
	next, err = call(ctx, c, doing, func(callCtx context.Context) (func() ([]byte, error), error) {
		return opening(ctx, callCtx, follow, func(streamCtx context.Context) (func() ([]byte, error), error) {
			next, err := source(streamCtx)
			if err != nil {
				return nil, err
			}
			if first, err = next(); errors.Is(err, io.EOF) {
				ended = true
				return next, nil
			}
			return next, err
		})
	})
	if err == nil && ended {
		err = io.EOF
	}
	return next, first, err
}
