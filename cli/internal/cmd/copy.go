package cmd

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/transfer"
	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
)

// copyOptions are the flags of `cp`.
type copyOptions struct {
	user     string
	progress bool
}

func newCp(c *cli) *cobra.Command {
	o := &copyOptions{}
	cmd := &cobra.Command{
		Use:     "cp SOURCE DESTINATION",
		Aliases: []string{"copy"},
		Short:   "Copy files to and from a sandbox",
		Long: `Copy a file or a directory between this machine and a sandbox. A path in a sandbox is NAME:PATH; a relative PATH begins at the home
directory of the user. A colon after a slash belongs to a local name: ./a:b. A dash alone is standard input or standard output.

The destination is that of "cp -r":
  - in a directory that exists, the copy has the last part of SOURCE as its name; DIR/. copies what is in DIR
  - a path that does not exist becomes the copy, if its parent exists; with a slash at its end only for a directory
  - a file that exists is replaced; a directory that exists is added to

Permissions and times are preserved, owners are not: the copy belongs to the user. On this machine, the bits for setuid and setgid
are dropped. A symbolic link named as SOURCE is followed, those inside a directory are copied as links; from a sandbox, a link
that leads out of the copy is left out with a warning. Devices, FIFOs and sockets inside a directory are left out.

A file has its name at the destination when it is complete: an interrupted copy leaves no partial file. An archive of a sandbox with
absolute paths, "..", devices or hard links is refused. A copy from a sandbox to a sandbox takes two commands and a pipe.`,
		Example: `  # a directory into /tmp, as /tmp/src
  fsb-ctl cp ./src web:/tmp/

  # a file to here
  fsb-ctl cp web:/var/log/app.log .

  # streams
  tar c src | fsb-ctl cp - web:/tmp/src.tar
  fsb-ctl cp web:/tmp/report.csv - | head

  # between sandboxes
  fsb-ctl cp one:/data.bin - | fsb-ctl cp - two:/data.bin

  # a name with a leading dash
  fsb-ctl cp -- -name web:/tmp/`,
		Args:              exactly("SOURCE", "DESTINATION"),
		ValidArgsFunction: c.completeCopy,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("progress") {
				c.progress.on, c.progress.lines = o.progress, !c.Terminal
			}
			return o.run(cmd.Context(), c, args[0], args[1])
		},
	}
	cmd.Flags().StringVarP(&o.user, "user", "u", "", "`user` or uid of the sandbox, with a group after a colon")
	cmd.Flags().BoolVar(&o.progress, "progress", false, "show bytes and rate of a copy that takes longer than a second (default: on a terminal)")
	_ = cmd.RegisterFlagCompletionFunc("user", cobra.NoFileCompletions)
	return cmd
}

func (o *copyOptions) run(ctx context.Context, c *cli, from, to string) error {
	source, err := transfer.Parse(from)
	if err != nil {
		return usageError{err}
	}
	destination, err := transfer.Parse(to)
	switch {
	case err != nil:
		return usageError{err}
	case source.Sandbox != "" && destination.Sandbox != "":
		return usagef("both %q and %q are in sandboxes; copy a file through this machine: fsb-ctl cp %s - | fsb-ctl cp - %s", from, to, from, to)
	case source.Sandbox == "" && destination.Sandbox == "":
		return usagef("neither %q nor %q is in a sandbox, as NAME:PATH", from, to)
	}
	remote, err := o.remote(c, source.Sandbox+destination.Sandbox, from)
	if err != nil {
		return err
	}
	defer c.progress.stop()
	switch {
	case source.Stream:
		err = remote.PutStream(ctx, c.In, destination.Path)
	case destination.Stream:
		err = remote.GetStream(ctx, source.Path, c.Out)
	case source.Sandbox != "":
		err = remote.Get(ctx, source.Path, destination.Path)
	default:
		err = remote.Put(ctx, source.Path, destination.Path)
	}
	return c.classify(err)
}

// remote returns the file system of a sandbox.
func (o *copyOptions) remote(c *cli, name, from string) (*transfer.Remote, error) {
	client, err := c.files()
	if err != nil {
		return nil, err
	}
	r := &transfer.Remote{Client: client, Namespace: c.settings.Namespace, Sandbox: name, User: o.user, Warn: c.infof}
	show := c.meter(r, from)
	r.Stat = func(ctx context.Context, path string) (*filesystemv1.File, error) {
		defer show()
		out, err := call(ctx, c, "", func(ctx context.Context) (*filesystemv1.StatResponse, error) {
			return client.Stat(ctx, &filesystemv1.StatRequest{Namespace: r.Namespace, Name: name, User: o.user, Path: path, Follow: true})
		})
		return out.GetFile(), err
	}
	return r, nil
}

// files returns a client of the API for files.
func (c *cli) files() (filesystemv1.FilesystemServiceClient, error) {
	conn, err := c.connectFor(true)
	if err != nil {
		return nil, err
	}
	return filesystemv1.NewFilesystemServiceClient(conn), nil
}

// meter counts what a copy copies. The returned function shows that until the progress is stopped.
func (c *cli) meter(r *transfer.Remote, what string) (show func()) {
	var total atomic.Int64
	r.Count = func(n int) { total.Add(int64(n)) }
	begin := c.Clock.Now()
	return func() {
		c.progress.show(func() string {
			n := total.Load()
			rate := float64(n) / max(c.Clock.Since(begin).Seconds(), 0.001)
			return fmt.Sprintf("copying %q: %s, %s/s", what, bytesOf(n), bytesOf(int64(rate)))
		})
	}
}

// bytesOf returns a number of bytes for people.
func bytesOf(n int64) string {
	const units = "KMGTPE"
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	size, unit := float64(n)/(1<<10), 0
	for size >= 1<<10 {
		size, unit = size/(1<<10), unit+1
	}
	return fmt.Sprintf("%.1f %ciB", size, units[unit])
}
