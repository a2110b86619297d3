//go:build e2e

package e2e_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

func detailsOf(err error) (*errdetails.ErrorInfo, *errdetails.RetryInfo) {
	var info *errdetails.ErrorInfo
	var retry *errdetails.RetryInfo
	for _, d := range status.Convert(err).Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			info = d
		case *errdetails.RetryInfo:
			retry = d
		}
	}
	return info, retry
}

// TestBadInput sends an invalid value in every field and expects a typed error, nothing on the node, and agents that stay ready.
func TestBadInput(t *testing.T) {
	c := sandboxes(t)
	taken := create(t, c, sleeper(uniqueName("taken"))).GetSandbox().GetName()
	before := containers(t)
	tests := []struct {
		name   string
		change func(*sandboxv1.CreateSandboxRequest)
		code   codes.Code
		reason string
		says   string
	}{
		{"unknown pool", func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Pool = "nowhere" }, codes.NotFound, "POOL_NOT_FOUND", "nowhere"},
		{"no image", func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Image = "" }, codes.InvalidArgument, "INVALID_FIELD", "spec.image"},
		{"invalid image reference", func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Image = "No Image" }, codes.InvalidArgument, "INVALID_FIELD", "spec.image"},
		{"image that does not exist", func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Image = "127.0.0.1:1/none/none:x" }, codes.Unavailable, "IMAGE_PULL_FAILED", "127.0.0.1:1/none/none:x"},
		{"command that does not exist", func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Command = []string{"/no/such/thing"} }, codes.FailedPrecondition, "COMMAND_NOT_FOUND", "/no/such/thing"},
		{"command that is no program", func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Command = []string{"/etc/passwd"} }, codes.FailedPrecondition, "COMMAND_NOT_EXECUTABLE", "/etc/passwd"},
		{"command of a sandbox without a process", func(r *sandboxv1.CreateSandboxRequest) { r.Spec.KeepAlive = true }, codes.InvalidArgument, "INVALID_FIELD", "spec.keep_alive"},
		{"relative working dir", func(r *sandboxv1.CreateSandboxRequest) { r.Spec.WorkingDir = "tmp" }, codes.InvalidArgument, "INVALID_FIELD", "spec.working_dir"},
		{"port out of range", func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Ports = []int32{70000} }, codes.InvalidArgument, "INVALID_FIELD", "spec.ports"},
		{"port twice", func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Ports = []int32{80, 80} }, codes.InvalidArgument, "INVALID_FIELD", "spec.ports"},
		{"port of the agent", func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Ports = []int32{5758} }, codes.ResourceExhausted, "PORT_CONFLICT", "5758"},
		{"invalid name", func(r *sandboxv1.CreateSandboxRequest) { r.Name = "Not_A_Label" }, codes.InvalidArgument, "INVALID_FIELD", "name"},
		{"name too long", func(r *sandboxv1.CreateSandboxRequest) { r.Name = strings.Repeat("a", 64) }, codes.InvalidArgument, "INVALID_FIELD", "name"},
		{"name taken", func(r *sandboxv1.CreateSandboxRequest) { r.Name = taken }, codes.AlreadyExists, "SANDBOX_EXISTS", taken},
		{"no spec", func(r *sandboxv1.CreateSandboxRequest) { r.Spec = nil }, codes.InvalidArgument, "INVALID_FIELD", "spec"},
		{"expired already", func(r *sandboxv1.CreateSandboxRequest) {
			r.Spec.ExpireTime = timestamppb.New(time.Now().Add(-time.Hour))
		}, codes.InvalidArgument, "INVALID_FIELD", "spec.expire_time"},
		{"oversized", func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Args = []string{strings.Repeat("x", 2<<20)} }, codes.InvalidArgument, "REQUEST_TOO_LARGE", "bytes"},
		{"invalid label", func(r *sandboxv1.CreateSandboxRequest) { r.Labels = map[string]string{"a b": "c"} }, codes.InvalidArgument, "INVALID_FIELD", "labels"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			req := sleeper(uniqueName("bad"))
			tt.change(req)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			_, err := c.CreateSandbox(ctx, req)
			require.Equal(t, tt.code, status.Code(err), "%v", err)
			info, retry := detailsOf(err)
			require.Equal(t, tt.reason, info.GetReason(), "%v", err)
			require.Contains(t, err.Error(), tt.says)
			if tt.code == codes.ResourceExhausted || tt.code == codes.Unavailable {
				require.NotNil(t, retry, "RetryInfo")
			}
		})
	}
	require.True(t, eventually(settle, func() bool { return len(containers(t)) <= len(before) }), "left on the node: %v, before: %v", containers(t), before)
	require.NotEmpty(t, readyAgents(t), "bad requests must not make an agent unavailable")
	create(t, c, sleeper(uniqueName("after")))
}

// containers lists the sandboxes' containers on the node.
func containers(t *testing.T) []string {
	t.Helper()
	list, err := nodeClient(t).ContainerService().List(nodeContext(t.Context()), fmt.Sprintf("labels.%q==true,labels.%q==%q", v1alpha1.LabelManaged, v1alpha1.LabelState, v1alpha1.StateClaimed))
	require.NoError(t, err)
	var ids []string
	for _, x := range list {
		ids = append(ids, x.ID)
	}
	return ids
}

func TestShortDeadlineLeavesNothing(t *testing.T) {
	c := sandboxes(t)
	before := len(containers(t))
	var late []string
	for i := range 10 {
		req := sleeper(uniqueName("late"))
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+i*8)*time.Millisecond)
		resp, err := c.CreateSandbox(ctx, req)
		cancel()
		if err == nil { // it was fast enough
			deleteAndWait(t, c, resp.GetSandbox())
			continue
		}
		require.Equal(t, codes.DeadlineExceeded, status.Code(err), "%v", err)
		late = append(late, req.GetName())
	}
	// The server may have answered when the deadline passed: that sandbox is complete, and can be deleted by name.
	for _, name := range late {
		got, err := c.GetSandbox(t.Context(), &sandboxv1.GetSandboxRequest{Namespace: cluster.Namespace, Name: name})
		if status.Code(err) != codes.NotFound {
			require.NoError(t, err)
			deleteAndWait(t, c, got.GetSandbox())
		}
	}
	require.True(t, eventually(settle, func() bool { return len(containers(t)) <= before }), "left: %v", containers(t))
}

// TestPortIsUniquePerAgent uses a port on every agent and expects a typed refusal.
func TestPortIsUniquePerAgent(t *testing.T) {
	c := sandboxes(t)
	for range 6 { // more than the pool's greatest number of agents
		req := sleeper(uniqueName("port"))
		req.Spec.Ports = []int32{8333}
		resp, err := c.CreateSandbox(t.Context(), req)
		if err != nil {
			info, retry := detailsOf(err)
			require.Equal(t, "PORT_CONFLICT", info.GetReason(), "%v", err)
			require.NotNil(t, retry)
			require.Contains(t, err.Error(), "8333")
			return
		}
		t.Cleanup(func() { deleteAndWait(t, c, resp.GetSandbox()) })
	}
	t.Fatal("one port was reserved more often than there are agents")
}

// TestNoCapacity fills its own pool.
func TestNoCapacity(t *testing.T) {
	c, kube := sandboxes(t), cluster.Kube(t)
	template := &v1alpha1.SandboxPool{}
	require.NoError(t, kube.Get(t.Context(), client.ObjectKey{Namespace: cluster.Namespace, Name: cluster.Pool}, template))
	pool := &v1alpha1.SandboxPool{Spec: template.Spec}
	pool.Namespace, pool.Name = cluster.Namespace, uniqueName("small")
	pool.Spec.MaxSandboxesPerPod = 2
	pool.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 1}
	require.NoError(t, kube.Create(t.Context(), pool))
	t.Cleanup(func() { require.NoError(t, kube.Delete(context.WithoutCancel(t.Context()), pool)) })
	require.True(t, eventually(time.Minute, func() bool {
		return kube.Get(t.Context(), client.ObjectKeyFromObject(pool), pool) == nil && pool.Status.FreeCapacity == 2
	}), "pool status %+v", pool.Status)

	for i := range 3 {
		req := sleeper(uniqueName("full"))
		req.Spec.Pool = pool.Name
		resp, err := c.CreateSandbox(t.Context(), req)
		if i < 2 {
			require.NoError(t, err)
			t.Cleanup(func() { deleteAndWait(t, c, resp.GetSandbox()) })
			continue
		}
		require.Equal(t, codes.ResourceExhausted, status.Code(err))
		info, retry := detailsOf(err)
		require.Equal(t, "NO_CAPACITY", info.GetReason())
		require.NotNil(t, retry)
	}
}

func TestAPIServerRefusesInvalidManifests(t *testing.T) {
	for field, wrong := range map[string]string{
		"exposedPorts": "exposedPorts: [70000]", "poolRef": "poolRef: Not_A_Label", "failurePolicy": "failurePolicy: Perhaps",
		"workingDir": "workingDir: relative", "only cpu, memory and pids": "resources: {limits: {disk: 1}}",
	} {
		t.Run(field, func(t *testing.T) {
			text := "apiVersion: fast-sandbox.io/v1alpha1\nkind: Sandbox\nmetadata: {name: wrong, namespace: default}\nspec:\n  image: x\n  " + wrong + "\n"
			if field != "poolRef" {
				text += "  poolRef: default\n"
			}
			r := cluster.Run(t, text, "kubectl", "apply", "-f", "-")
			require.NotZero(t, r.Code)
			require.Contains(t, r.Stderr, field)
		})
	}
}
