//go:build e2e

// Package e2e_test uses the whole mesh as its users do: with gRPC, REST, kubectl, grpcurl and fsb-ctl, against agents that
// a real kubelet runs on a real containerd.
package e2e_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

const (
	// settle is how long the mesh may take to clean up behind a call.
	settle = 15 * time.Second
	tick   = 100 * time.Millisecond
)

// uniqueName returns a name that no other test or run uses.
func uniqueName(prefix string) string { return prefix + "-" + uuid.NewString()[:8] }

func sandboxes(t *testing.T) sandboxv1.SandboxServiceClient {
	return sandboxv1.NewSandboxServiceClient(cluster.Dial(t))
}

// sleeper returns a create of a sandbox that runs until it is stopped.
func sleeper(name string) *sandboxv1.CreateSandboxRequest {
	return &sandboxv1.CreateSandboxRequest{
		Namespace: cluster.Namespace, Name: name, RequestId: uuid.NewString(),
		Spec: &sandboxv1.SandboxSpec{
			Image: cluster.Busybox, Pool: cluster.Pool,
			Command: []string{"sh", "-c", "trap 'exit 0' TERM; while true; do sleep 0.2; done"},
		},
	}
}

// create creates a sandbox, and deletes it when the test ends.
func create(t *testing.T, c sandboxv1.SandboxServiceClient, req *sandboxv1.CreateSandboxRequest) *sandboxv1.CreateSandboxResponse {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	resp, err := c.CreateSandbox(ctx, req)
	require.NoError(t, err)
	t.Cleanup(func() { deleteAndWait(t, c, resp.GetSandbox()) })
	return resp
}

// deleteAndWait deletes a sandbox, if it still exists, and waits until nothing of it is left.
func deleteAndWait(t *testing.T, c sandboxv1.SandboxServiceClient, s *sandboxv1.Sandbox) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	_, err := c.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: s.GetNamespace(), Name: s.GetName()})
	if err != nil {
		require.Contains(t, err.Error(), "NotFound", "deleting %s", s.GetName())
	}
	gone(t, s.GetNamespace(), s.GetName(), s.GetUid())
}

// gone waits until neither the API server nor the node has anything of the sandbox.
func gone(t *testing.T, namespace, name, uid string) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	kube, node := cluster.Kube(t), nodeClient(t)
	var left []string
	ok := eventually(settle, func() bool {
		left = leftovers(ctx, t, node, uid)
		err := kube.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, &v1alpha1.Sandbox{})
		if !apierrors.IsNotFound(err) {
			left = append(left, fmt.Sprintf("custom resource (%v)", err))
		}
		return len(left) == 0
	})
	require.True(t, ok, "left of sandbox %s/%s (%s): %s", namespace, name, uid, strings.Join(left, ", "))
}

// eventually polls until the condition holds or the time is over.
func eventually(limit time.Duration, condition func() bool) bool {
	deadline, ticker := time.After(limit), time.NewTicker(tick)
	defer ticker.Stop()
	for {
		if condition() {
			return true
		}
		select {
		case <-deadline:
			return condition()
		case <-ticker.C:
		}
	}
}

func nodeClient(t *testing.T) *containerd.Client {
	t.Helper()
	_, c := cluster.Containerd(t)
	return c
}

// readyAgents returns the agents that accept sandboxes.
func readyAgents(t *testing.T) []*allocatorv1.Agent {
	t.Helper()
	resp, err := allocatorv1.NewAllocatorServiceClient(cluster.Dial(t)).ListAgents(t.Context(),
		&allocatorv1.ListAgentsRequest{Namespace: cluster.Namespace, Pool: cluster.Pool})
	require.NoError(t, err)
	var ready []*allocatorv1.Agent
	for _, a := range resp.GetAgents() {
		if a.GetReady() {
			ready = append(ready, a)
		}
	}
	return ready
}

// customResource waits for the sandbox's custom resource to meet the condition, and returns it.
func customResource(t *testing.T, name string, condition func(*v1alpha1.Sandbox) bool) *v1alpha1.Sandbox {
	t.Helper()
	kube, s := cluster.Kube(t), &v1alpha1.Sandbox{}
	var last error
	ok := eventually(settle, func() bool {
		last = kube.Get(t.Context(), client.ObjectKey{Namespace: cluster.Namespace, Name: name}, s)
		return last == nil && condition(s)
	})
	require.True(t, ok, "custom resource %s: %v, status %+v", name, last, s.Status)
	return s
}

func running(s *v1alpha1.Sandbox) bool { return s.Status.Phase == v1alpha1.PhaseRunning }
