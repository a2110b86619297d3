//go:build e2e

package e2e_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

// TestDeleteRightAfterCreate overtakes the write of the custom resource 40 times; nothing may be left.
func TestDeleteRightAfterCreate(t *testing.T) {
	c := sandboxes(t)
	prefix := uniqueName("churn")
	var mu sync.Mutex
	uids := map[string]string{}
	group, ctx := errgroup.WithContext(t.Context())
	group.SetLimit(8)
	for i := range 40 {
		group.Go(func() error {
			req := sleeper(prefix + "-" + itoa(i))
			ctx, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			resp, err := c.CreateSandbox(ctx, req)
			if err != nil {
				return err
			}
			mu.Lock()
			uids[req.GetName()] = resp.GetSandbox().GetUid()
			mu.Unlock()
			_, err = c.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: req.GetNamespace(), Name: req.GetName()})
			return err
		})
	}
	require.NoError(t, group.Wait())
	require.Len(t, uids, 40)
	kube, node := cluster.Kube(t), nodeClient(t)
	var left []string
	require.True(t, eventually(settle, func() bool {
		left = nil
		for _, uid := range uids {
			left = append(left, leftovers(t.Context(), t, node, uid)...)
		}
		var list v1alpha1.SandboxList
		require.NoError(t, kube.List(t.Context(), &list, client.InNamespace(cluster.Namespace)))
		for _, s := range list.Items {
			if strings.HasPrefix(s.Name, prefix) {
				left = append(left, "custom resource "+s.Name)
			}
		}
		return len(left) == 0
	}), "left: %v", left)
}

// TestOneRequestIDIsOneSandbox repeats a create, sequentially and concurrently.
func TestOneRequestIDIsOneSandbox(t *testing.T) {
	c := sandboxes(t)
	req := sleeper(uniqueName("once"))
	first := create(t, c, req)
	again, err := c.CreateSandbox(t.Context(), req)
	require.NoError(t, err)
	require.Equal(t, first.GetSandbox().GetUid(), again.GetSandbox().GetUid())
	require.True(t, again.GetReplayed())

	other := sleeper(req.GetName())
	other.RequestId, other.Spec.Args = req.GetRequestId(), []string{"something else"}
	_, err = c.CreateSandbox(t.Context(), other)
	require.Equal(t, codes.AlreadyExists, status.Code(err), "%v", err)
	info, _ := detailsOf(err)
	require.Equal(t, "REQUEST_ID_REUSED", info.GetReason())

	together := sleeper(uniqueName("together"))
	var mu sync.Mutex
	uids := map[string]bool{}
	var group errgroup.Group
	for range 8 {
		group.Go(func() error {
			resp, err := c.CreateSandbox(t.Context(), together)
			if err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			uids[resp.GetSandbox().GetUid()] = true
			return nil
		})
	}
	require.NoError(t, group.Wait())
	require.Len(t, uids, 1)
	for uid := range uids {
		deleteAndWait(t, c, &sandboxv1.Sandbox{Namespace: together.GetNamespace(), Name: together.GetName(), Uid: uid})
	}
}

// TestNameCanBeReused creates and deletes several sandboxes of one name.
func TestNameCanBeReused(t *testing.T) {
	c := sandboxes(t)
	name := uniqueName("again")
	seen := map[string]bool{}
	for range 3 {
		req := sleeper(name)
		req.RequestId = uuid.NewString()
		resp, err := c.CreateSandbox(t.Context(), req)
		require.NoError(t, err)
		require.False(t, seen[resp.GetSandbox().GetUid()])
		seen[resp.GetSandbox().GetUid()] = true
		deleteAndWait(t, c, resp.GetSandbox())
	}
}
