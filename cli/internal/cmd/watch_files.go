package cmd

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/transfer"
	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// filesWatch are the flags of `watch NAME:PATH`.
type filesWatch struct {
	user      string
	recursive bool
}

func (o *filesWatch) addFlags(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&o.user, "user", "u", "", "with NAME:PATH: `user` or uid of the sandbox, with a group after a colon")
	cmd.Flags().BoolVarP(&o.recursive, "recursive", "r", false, "with NAME:PATH: also the directories in it")
	_ = cmd.RegisterFlagCompletionFunc("user", cobra.NoFileCompletions)
}

// refused returns an error if a flag of the other kind of watch is set.
func (o *filesWatch) refused(cmd *cobra.Command, directory bool) error {
	mine := map[string]bool{"user": true, "recursive": true}
	for _, name := range []string{"user", "recursive", "all-namespaces", "pool", "selector", "phase"} {
		if f := cmd.LocalFlags().Lookup(name); f != nil && f.Changed && mine[name] != directory {
			return usagef("--%s is for %s", name, map[bool]string{true: "a watch of NAME:PATH", false: "a watch of sandboxes"}[mine[name]])
		}
	}
	return nil
}

// run prints the changes in a directory of a sandbox until ctx ends, which is not an error.
func (o *filesWatch) run(ctx context.Context, c *cli, at transfer.Location) error {
	client, err := c.files()
	if err != nil {
		return err
	}
	in := &filesystemv1.WatchDirectoryRequest{Namespace: c.settings.Namespace, Name: at.Sandbox, User: o.user, Path: at.Path, Recursive: o.recursive}
	for again := false; ; again = true {
		began, err := o.once(ctx, c, client, in, again)
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // Ctrl-C is how a watch ends
		case began && (errdefs.IsUnavailable(err) || fault.ReasonOf(err) == fault.Overloaded):
			// The stream worked before: open it again.
		default:
			return err
		}
	}
}

// once prints the changes of one stream. It reports whether that has begun. What changed between two streams is not known, which is what an overflow
// means, too.
func (o *filesWatch) once(ctx context.Context, c *cli, client filesystemv1.FilesystemServiceClient, in *filesystemv1.WatchDirectoryRequest, again bool) (bool, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type opened = begun[filesystemv1.WatchDirectoryResponse]
	b, err := call(ctx, c, "watching", func(callCtx context.Context) (opened, error) {
		return opening(ctx, callCtx, false, func(streamCtx context.Context) (opened, error) {
			stream, err := client.WatchDirectory(streamCtx, in)
			if err != nil {
				return opened{}, err
			}
			first, err := stream.Recv()
			return opened{stream, first}, ended(err)
		})
	})
	if err != nil {
		return false, err
	}
	for event := b.first; ; {
		if again && event.GetType() == filesystemv1.WatchDirectoryResponse_TYPE_STARTED {
			event = &filesystemv1.WatchDirectoryResponse{Type: filesystemv1.WatchDirectoryResponse_TYPE_OVERFLOW, Path: in.GetPath(), Directory: true}
		}
		if event.GetPath() == "" {
			event.Path = in.GetPath() // that of the directory itself
		}
		if err := o.print(c, event); err != nil {
			return true, err
		}
		if event, err = b.stream.Recv(); err != nil {
			return true, c.classify(ended(err))
		}
	}
}

func (o *filesWatch) print(c *cli, event *filesystemv1.WatchDirectoryResponse) error {
	if event.GetType() == filesystemv1.WatchDirectoryResponse_TYPE_KEEPALIVE {
		return nil
	}
	if done, err := c.printNext(event); done {
		return err
	}
	path := event.GetPath()
	if strings.ContainsFunc(path, func(r rune) bool { return !strconv.IsPrint(r) }) {
		path = strconv.Quote(path) // a name can have any character, those that control a terminal included
	}
	if event.GetDirectory() && !strings.HasSuffix(path, "/") {
		path += "/"
	}
	word := strings.TrimPrefix(event.GetType().String(), "TYPE_")
	if c.settings.Output == "name" {
		_, err := fmt.Fprintln(c.Out, path)
		return err
	}
	_, err := fmt.Fprintf(c.Out, "%-10s  %s\n", word, path)
	return err
}
