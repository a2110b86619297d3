package cmd

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

func newLogs(c *cli) *cobra.Command {
	var follow bool
	var tail int64
	var since time.Duration
	cmd := &cobra.Command{
		Use:   "logs NAME",
		Short: "Print a sandbox's output",
		Long:  "Print what a sandbox's process wrote to its standard output and standard error, byte for byte.",
		Example: `  fsb-ctl logs web
  fsb-ctl logs web -f --tail 20
  fsb-ctl logs web --since 5m`,
		Args:              exactly("NAME"),
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			in := &sandboxv1.StreamLogsRequest{Namespace: c.settings.Namespace, Name: args[0], Follow: follow}
			if cmd.Flags().Changed("tail") {
				if tail < 0 {
					return usagef("--tail is %d, want 0 or more", tail)
				}
				in.TailLines = &tail
			}
			if cmd.Flags().Changed("since") {
				if since <= 0 {
					return usagef("--since is %s, want more than 0", since)
				}
				in.Since = timestamppb.New(c.Clock.Now().Add(-since))
			}
			client, err := c.sandboxes()
			if err != nil {
				return err
			}
			return copyLogs(cmd.Context(), c, client, in)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the process has ended")
	cmd.Flags().Int64Var(&tail, "tail", 0, "only the last so many `lines` (default: all that is kept)")
	cmd.Flags().DurationVar(&since, "since", 0, "only what was written within this `time`: 30s, 5m")
	return cmd
}

// copyLogs copies a sandbox's output until the stream ends. A stream that breaks is opened again, within the timeout, and
// what was printed before is skipped; where that cannot be counted, because the request asks for a part alone, the break
// is an error once something was printed. The time that the stream itself takes is not bounded.
func copyLogs(ctx context.Context, c *cli, client sandboxv1.SandboxServiceClient, in *sandboxv1.StreamLogsRequest) error {
	var printed int64
	whole := in.TailLines == nil && in.GetSince() == nil
	for {
		before := printed
		err := copyOnce(ctx, c, client, in, &printed)
		broken := err != nil && ctx.Err() == nil && errdefs.IsUnavailable(err)
		if !broken || printed == before || !whole {
			return err
		}
	}
}

func copyOnce(ctx context.Context, c *cli, client sandboxv1.SandboxServiceClient, in *sandboxv1.StreamLogsRequest, printed *int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, first, err := openLogs(ctx, c, client, in)
	skip := *printed
	for chunk := first; ; {
		if err != nil {
			break
		}
		data := chunk.GetData()
		dropped := min(skip, int64(len(data)))
		skip -= dropped
		n, werr := c.Out.Write(data[dropped:])
		if *printed += int64(n); werr != nil {
			return werr
		}
		chunk, err = stream.Recv()
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return c.classify(err)
}

type opened struct {
	stream sandboxv1.SandboxService_StreamLogsClient
	first  *sandboxv1.StreamLogsResponse
}

// openLogs opens the stream and returns its first message, or io.EOF. Only this much is repeated while the server is
// unavailable, and only this much is bounded by the timeout, for one who does not follow: a follower of a silent process
// waits for its first message for as long as it takes.
func openLogs(ctx context.Context, c *cli, client sandboxv1.SandboxServiceClient, in *sandboxv1.StreamLogsRequest) (sandboxv1.SandboxService_StreamLogsClient, *sandboxv1.StreamLogsResponse, error) {
	doing := "reading the output"
	if in.GetFollow() {
		doing = "" // silence is the process's
	}
	o, err := call(ctx, c, doing, func(callCtx context.Context) (*opened, error) {
		streamCtx, release := opening(ctx, callCtx, in.GetFollow())
		defer release()
		stream, err := client.StreamLogs(streamCtx, in)
		if err != nil {
			return nil, err
		}
		first, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return &opened{stream, nil}, nil
		}
		return &opened{stream, first}, err
	})
	if err != nil {
		return nil, nil, err
	}
	if o.first == nil {
		return o.stream, nil, io.EOF
	}
	return o.stream, o.first, nil
}

// opening returns the context of a stream: it lives as long as ctx, and until release it also ends with callCtx, unless the
// first message may take forever. The end of ctx frees what it holds.
func opening(ctx, callCtx context.Context, forever bool) (context.Context, func() bool) {
	if forever {
		return ctx, func() bool { return true }
	}
	streamCtx, cancel := context.WithCancelCause(ctx)
	return streamCtx, context.AfterFunc(callCtx, func() { cancel(context.Cause(callCtx)) })
}

// ended makes an error of a stream that ends where it should go on.
func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return status.Error(codes.Unavailable, "the server ended the stream")
	}
	return err
}
