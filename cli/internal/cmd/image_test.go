package cmd_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func pull(node, phase, message string) *allocatorv1.PullImageResponse {
	return &allocatorv1.PullImageResponse{
		NodeName: node, AgentPod: "agent-" + node, Error: message,
		Progress: &agentv1.PullProgress{Phase: phase, DownloadedBytes: 3, TotalBytes: 4, Elapsed: durationpb.New(2345 * time.Millisecond)},
	}
}

func TestImageList(t *testing.T) {
	var got *allocatorv1.ListImagesRequest
	images := []*allocatorv1.PoolImage{
		{Image: "docker.io/library/python:3.13", Pinned: true, Nodes: []*allocatorv1.NodeImage{
			{NodeName: "node-1", AgentPod: "agent-1", Present: true, State: agentv1.PinnedImageState_PINNED_IMAGE_STATE_READY},
			{NodeName: "node-2", AgentPod: "agent-2", State: agentv1.PinnedImageState_PINNED_IMAGE_STATE_FAILED, Message: "no such host"},
		}},
		{Image: "docker.io/library/busybox:1", Nodes: []*allocatorv1.NodeImage{{NodeName: "node-1", AgentPod: "agent-1", Present: true}}},
	}
	b := start(t, &fake{images: func(_ context.Context, in *allocatorv1.ListImagesRequest) (*allocatorv1.ListImagesResponse, error) {
		got = in
		if in.GetNamespace() == "empty" {
			return &allocatorv1.ListImagesResponse{}, nil
		}
		return &allocatorv1.ListImagesResponse{Images: images}, nil
	}})
	for args, want := range map[string]string{
		"": `
IMAGE                           PINNED   NODES
docker.io/library/python:3.13   yes      1/2
docker.io/library/busybox:1     no       1/1
`,
		"-o wide": `
IMAGE                           PINNED   NODE     AGENT     PRESENT   STATE    MESSAGE
docker.io/library/python:3.13   yes      node-1   agent-1   yes       Ready    <none>
docker.io/library/python:3.13   yes      node-2   agent-2   no        Failed   no such host
docker.io/library/busybox:1     no       node-1   agent-1   yes       <none>   <none>
`,
		"-o name":          "\nimage/docker.io/library/python:3.13\nimage/docker.io/library/busybox:1\n",
		"-n empty -o json": "\n{\n  \"images\": []\n}\n",
		"-n empty":         "\n",
	} {
		t.Run(args, func(t *testing.T) {
			r := b.run(t, append([]string{"image", "list"}, strings.Fields(args)...)...)
			require.Zero(t, r.code, r.err)
			require.Equal(t, strings.TrimPrefix(want, "\n"), r.out)
		})
	}
	require.Contains(t, b.run(t, "image", "list", "-o", "yaml").out, "message: no such host\n")
	require.Empty(t, got.GetPool(), "the server knows the default pool")
	b.env["FSB_POOL"] = "of-env"
	b.run(t, "image", "list")
	require.Equal(t, "of-env", got.GetPool())
	b.run(t, "image", "list", "--pool", "of-flag")
	require.Equal(t, "of-flag", got.GetPool())
}

func TestImagePull(t *testing.T) {
	var got *allocatorv1.PullImageRequest
	messages := []*allocatorv1.PullImageResponse{
		pull("node-2", "downloading", ""), pull("node-1", "resolving", ""), pull("node-1", "done", ""), pull("node-2", "failed", "no such host"),
	}
	b := start(t, &fake{pull: func(in *allocatorv1.PullImageRequest, s allocatorv1.AllocatorService_PullImageServer) error {
		got = in
		for _, m := range messages {
			if err := s.Send(m); err != nil {
				return err
			}
		}
		return nil
	}})
	r := b.run(t, "image", "pull", "busybox", "--pool", "p")
	require.Empty(t, cmp.Diff(&allocatorv1.PullImageRequest{Namespace: "default", Pool: "p", Image: "busybox"}, got, protocmp.Transform()))
	require.Equal(t, `NODE     AGENT          RESULT   TIME   MESSAGE
node-1   agent-node-1   done     2.3s   <none>
node-2   agent-node-2   failed   2.3s   no such host
`, r.out)
	require.Equal(t, 7, r.code)
	require.Contains(t, r.err, "error: pulling busybox failed on 1 of 2 nodes (IMAGE_PULL_FAILED)\nhint: check that the node can reach")

	require.Equal(t, "node/node-1\n", b.run(t, "image", "pull", "busybox", "-o", "name").out)
	require.Contains(t, b.run(t, "image", "pull", "busybox", "-o", "json").out, `"error": "no such host"`)

	messages = messages[:3]
	require.Equal(t, 7, b.run(t, "image", "pull", "busybox").code, "an agent that has sent no result has failed")
	messages = messages[1:]
	r = b.run(t, "image", "pull", "busybox")
	require.Zero(t, r.code, r.err)
	require.Empty(t, r.err)
	messages = nil
	r = b.run(t, "image", "pull", "busybox")
	require.Zero(t, r.code)
	require.Equal(t, "the pool has no ready agent\n", r.err)
}

func TestImagePullErrors(t *testing.T) {
	b := start(t, &fake{pull: func(_ *allocatorv1.PullImageRequest, s allocatorv1.AllocatorService_PullImageServer) error {
		if err := s.Send(pull("node-1", "downloading", "")); err != nil {
			return err
		}
		return fault.New(errdefs.ErrNotFound, fault.PoolNotFound, "no pool p")
	}})
	r := b.run(t, "image", "pull", "busybox")
	require.Equal(t, 3, r.code)
	require.Contains(t, r.err, "error: no pool p (POOL_NOT_FOUND)")
	require.Empty(t, r.out)
}
