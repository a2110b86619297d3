package cmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// pullDone is the phase of the last message about an agent that has pulled the image.
const pullDone = "done"

func newImage(c *cli) *cobra.Command {
	pool := ""
	image := &cobra.Command{
		Use: "image", Aliases: []string{"images"},
		Short: "Show and pull the images of a pool",
		Long: `Show the images on the nodes of a pool, and pull images ahead of the first sandbox.

The images that a pool lists in spec.images are pinned: each agent pulls them and keeps them. An image that "image pull"
pulled is not pinned: the kubelet may remove it when it needs the disk space.`,
		Example: "  fsb-ctl image list\n  fsb-ctl image pull docker.io/library/python:3.13 --pool default",
		Args:    cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q, want list or pull", args[0])
			}
			return cmd.Help()
		},
	}
	image.PersistentFlags().StringVar(&pool, "pool", "", "`pool` of the nodes [$FSB_POOL] (default: the namespace's default pool)")
	image.AddCommand(newImageList(c, &pool), newImagePull(c, &pool))
	for _, sub := range image.Commands() {
		_ = sub.RegisterFlagCompletionFunc("pool", c.completePools)
	}
	return image
}

func newImageList(c *cli, pool *string) *cobra.Command {
	return &cobra.Command{
		Use: "list", Aliases: []string{"ls"},
		Short: "List the images of a pool",
		Long: "List the images of a pool: those that it pins, and those that at least one of its nodes has. NODES is the number of nodes\n" +
			"that have the image and of all nodes; -o wide has a row for each node.",
		Example:           "  fsb-ctl image list\n  fsb-ctl image list --pool gpu -o wide",
		Args:              exactly(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := c.allocator()
			if err != nil {
				return err
			}
			in := &allocatorv1.ListImagesRequest{Namespace: c.settings.Namespace, Pool: cmp.Or(*pool, c.settings.Pool)}
			out, err := call(cmd.Context(), c, "listing images", func(ctx context.Context) (*allocatorv1.ListImagesResponse, error) {
				return client.ListImages(ctx, in)
			})
			if err != nil {
				return err
			}
			return printImages(c, out.GetImages())
		},
	}
}

func printImages(c *cli, images []*allocatorv1.PoolImage) error {
	if done, err := printList(c, "images", images); done {
		return err
	}
	if c.settings.Output == "name" {
		for _, i := range images {
			if err := c.printNames("image", i.GetImage()); err != nil {
				return err
			}
		}
		return nil
	}
	if len(images) == 0 {
		c.infof("no images found")
		return nil
	}
	return render.Images(images, c.settings.Output == "wide").Flush(c.Out)
}

func newImagePull(c *cli, pool *string) *cobra.Command {
	return &cobra.Command{
		Use:   "pull IMAGE",
		Short: "Pull an image on each node of a pool",
		Long: `Pull an image on each ready agent of a pool, and print the result for each node. On a terminal, standard error shows the
progress. If the pull fails on a node, the others continue, and the exit code is 7.`,
		Example:           "  fsb-ctl image pull docker.io/library/python:3.13\n  fsb-ctl image pull docker.io/library/python:3.13 --pool gpu -o json",
		Args:              exactly("IMAGE"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.allocator()
			if err != nil {
				return err
			}
			return pullImage(cmd.Context(), c, client, &allocatorv1.PullImageRequest{
				Namespace: c.settings.Namespace, Pool: cmp.Or(*pool, c.settings.Pool), Image: args[0],
			})
		},
	}
}

// pullImage pulls an image and prints the last message about each agent. The duration of the pull is not bounded.
func pullImage(ctx context.Context, c *cli, client allocatorv1.AllocatorServiceClient, in *allocatorv1.PullImageRequest) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	last := map[string]*allocatorv1.PullImageResponse{}
	b, err := openStream(ctx, c, "pulling "+in.GetImage(), func(ctx context.Context) (grpc.ServerStreamingClient[allocatorv1.PullImageResponse], error) {
		return client.PullImage(ctx, in)
	})
	defer c.progress.stop()
	for m := b.first; err == nil; m, err = b.stream.Recv() {
		last[m.GetAgentPod()] = m
		c.progress.start("pulling " + in.GetImage() + ": " + strings.Join(progressOf(last), ", "))
	}
	if !errors.Is(err, io.EOF) {
		return c.classify(err)
	}
	c.progress.stop()
	results := slices.SortedFunc(maps.Values(last), func(a, b *allocatorv1.PullImageResponse) int {
		return cmp.Or(cmp.Compare(a.GetNodeName(), b.GetNodeName()), cmp.Compare(a.GetAgentPod(), b.GetAgentPod()))
	})
	if err := printPulls(c, results); err != nil {
		return err
	}
	return pullError(in.GetImage(), results)
}

// progressOf returns the progress of each agent, in a stable order.
func progressOf(last map[string]*allocatorv1.PullImageResponse) []string {
	out := make([]string, 0, len(last))
	for _, m := range last {
		out = append(out, fmt.Sprintf("%s %s", m.GetNodeName(), render.PullProgress(m.GetProgress())))
	}
	slices.Sort(out)
	return out
}

func printPulls(c *cli, results []*allocatorv1.PullImageResponse) error {
	if done, err := printList(c, "results", results); done {
		return err
	}
	if c.settings.Output == "name" {
		for _, r := range results {
			if r.GetProgress().GetPhase() != pullDone {
				continue
			}
			if err := c.printNames("node", r.GetNodeName()); err != nil {
				return err
			}
		}
		return nil
	}
	if len(results) == 0 {
		c.infof("the pool has no ready agent")
		return nil
	}
	return render.Pulls(results).Flush(c.Out)
}

// pullError returns an error if the image was not pulled everywhere: an agent whose last message is not `done` has failed.
func pullError(image string, results []*allocatorv1.PullImageResponse) error {
	failed := 0
	for _, r := range results {
		if phase := r.GetProgress().GetPhase(); phase != pullDone || r.GetError() != "" {
			failed++
		}
	}
	if failed == 0 {
		return nil
	}
	return fault.New(errdefs.ErrUnavailable, fault.ImagePullFailed, "pulling %s failed on %d of %d nodes", image, failed, len(results))
}
