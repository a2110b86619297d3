package scale

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/google/uuid"
	"google.golang.org/protobuf/types/known/timestamppb"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/swarm"
)

// image is what every sandbox runs; all nodes have it.
const image = "docker.io/library/python:3.13"

// images are what every node has.
func images() []string {
	return []string{image, "docker.io/library/busybox:1.37", "docker.io/library/node:24", "docker.io/library/golang:1.26", "docker.io/library/alpine:3.22"}
}

func spec(ports ...int32) *sandboxv1.SandboxSpec {
	return &sandboxv1.SandboxSpec{
		Image: image, Pool: pool, Command: []string{"python3", "-m", "http.server"}, Ports: ports,
		Env: map[string]string{"TENANT": "tenant-0123456789", "SESSION": "0123456789abcdef"},
	}
}

// reportOf returns agent i's report of its j-th sandbox.
func reportOf(info *agentv1.AgentInfo, i, j int) *agentv1.SandboxReport {
	return swarm.Running(&agentv1.SandboxRecord{
		Fence:     &agentv1.Fence{SandboxUid: uuid.NewString(), Attempt: 1, AgentUid: info.GetPodUid()},
		Namespace: namespace, Name: fmt.Sprintf("sbx-%05d-%03d", i, j), Spec: spec(int32(8000 + j)), RequestId: uuid.NewString(),
		CreateTime: timestamppb.Now(), ConsistencyMode: sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST,
	}, info.GetPodIp(), true)
}

// request returns a create of a sandbox with a port that hardly any other has.
func request() *sandboxv1.CreateSandboxRequest {
	return &sandboxv1.CreateSandboxRequest{
		Namespace: namespace, Name: "load-" + uuid.NewString()[:18], RequestId: uuid.NewString(), Spec: spec(20000 + rand.Int32N(20000)),
	}
}

// finalize takes the controller's part until ctx ends: it removes the finalizer of a Sandbox that is being deleted. The
// allocator deletes the container before the custom resource.
func (w *testbed) finalize(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := w.finalizeOnce(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// finalizeOnce works for as long as one watch lasts.
func (w *testbed) finalizeOnce(ctx context.Context) error {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("SandboxList"))
	if err := w.api.Kube.List(ctx, list, client.InNamespace(namespace), client.Limit(1)); err != nil {
		return fmt.Errorf("listing sandboxes: %w", err)
	}
	events, err := w.api.Kube.Watch(ctx, list, client.InNamespace(namespace), &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.ResourceVersion}})
	if err != nil {
		return fmt.Errorf("watching sandboxes: %w", err)
	}
	defer events.Stop()
	patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
	for e := range events.ResultChan() {
		sb, ok := e.Object.(*metav1.PartialObjectMetadata)
		if e.Type == watch.Error {
			return errors.New("watching sandboxes: the watch has failed")
		}
		if !ok || e.Type != watch.Modified || sb.DeletionTimestamp == nil {
			continue
		}
		sb.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("Sandbox"))
		if err := w.api.Kube.Patch(ctx, sb, patch); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("removing a finalizer: %w", err)
		}
	}
	return nil
}
