//go:build e2e

package e2e_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// nodeContext selects Kubernetes' namespace of containerd.
func nodeContext(ctx context.Context) context.Context { return namespaces.WithNamespace(ctx, "k8s.io") }

// leftovers lists everything that the node has of one sandbox: containers, tasks, snapshots, mounts and log directories, whose
// names all contain its uid.
func leftovers(ctx context.Context, t *testing.T, c *containerd.Client, uid string) []string {
	t.Helper()
	ctx = nodeContext(ctx)
	var found []string
	containers, err := c.ContainerService().List(ctx, fmt.Sprintf("labels.%q==%q", v1alpha1.LabelSandboxUID, uid))
	require.NoError(t, err)
	for _, x := range containers {
		found = append(found, "container "+x.ID)
		if loaded, err := c.LoadContainer(ctx, x.ID); err == nil {
			if _, err := loaded.Task(ctx, nil); err == nil {
				found = append(found, "task "+x.ID)
			}
		}
	}
	require.NoError(t, c.SnapshotService("overlayfs").Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if strings.Contains(info.Name, uid) {
			found = append(found, "snapshot "+info.Name)
		}
		return nil
	}))
	for _, dir := range []string{"/var/log/fast-sandbox", "/run/fsb-local/containerd/io.containerd.runtime.v2.task/k8s.io"} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			require.ErrorIs(t, err, os.ErrNotExist)
		}
		for _, e := range entries {
			if strings.Contains(e.Name(), uid) {
				found = append(found, dir+"/"+e.Name())
			}
		}
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	require.NoError(t, err)
	if strings.Contains(string(mounts), uid) {
		found = append(found, "mount")
	}
	return found
}

// nodeEmptied waits until the node has no sandbox and no slot of a pool. Those of killed agents are the janitor's to delete; the containers of
// their Pods, which have the label as well, are the kubelet's.
func nodeEmptied(t *testing.T, pool string) {
	t.Helper()
	ctx := nodeContext(context.WithoutCancel(t.Context()))
	var left []string
	require.True(t, eventually(absentLimit, func() bool {
		list, err := nodeClient(t).ContainerService().List(ctx, fmt.Sprintf("labels.%q==%q,labels.%q==true", v1alpha1.LabelPool, pool, identity.KeyManaged))
		require.NoError(t, err)
		left = nil
		for _, x := range list {
			left = append(left, x.ID)
		}
		return len(left) == 0
	}), "the janitor has not deleted: %v", left)
}
