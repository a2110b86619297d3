package scale

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/types/known/timestamppb"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
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

// reportOf is what agent i says of its j-th sandbox.
func reportOf(info *agentv1.AgentInfo, i, j int) *agentv1.SandboxReport {
	return swarm.Running(&agentv1.SandboxRecord{
		Fence:     &agentv1.Fence{SandboxUid: uuid.NewString(), Attempt: 1, AgentUid: info.GetPodUid()},
		Namespace: namespace, Name: fmt.Sprintf("sbx-%05d-%03d", i, j), Spec: spec(int32(8000 + j)), RequestId: uuid.NewString(),
		CreateTime: timestamppb.Now(), ConsistencyMode: sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST,
	}, info.GetPodIp(), true)
}

// resourceOf is the custom resource of a sandbox that runs, as allocator and controller would have written it.
func resourceOf(info *agentv1.AgentInfo, r *agentv1.SandboxReport, port int) *v1alpha1.Sandbox {
	record := r.GetRecord()
	sb := &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: record.GetNamespace(), Name: record.GetName(), Finalizers: []string{v1alpha1.Finalizer},
			Labels: map[string]string{v1alpha1.LabelPool: pool, v1alpha1.LabelNode: info.GetNodeName()},
			Annotations: map[string]string{
				v1alpha1.AnnotationSandboxUID: record.GetFence().GetSandboxUid(), v1alpha1.AnnotationRequestID: record.GetRequestId(),
				v1alpha1.AnnotationCreateTime:    record.GetCreateTime().AsTime().Format(time.RFC3339Nano),
				v1alpha1.AnnotationRequestDigest: uuid.NewString(),
			},
		},
		Spec: convert.SpecFromProto(record.GetSpec()),
	}
	sb.Spec.ConsistencyMode = v1alpha1.ConsistencyModeFast
	sb.SetAssignment(&v1alpha1.Assignment{
		AgentPod: info.GetPodName(), AgentUID: info.GetPodUid(), NodeName: info.GetNodeName(),
		AgentAddress: fmt.Sprintf("%s:%d", info.GetPodIp(), port), SandboxUID: record.GetFence().GetSandboxUid(), Attempt: 1,
	})
	now := metav1.NewMicroTime(time.Now())
	sb.Status = v1alpha1.SandboxStatus{
		Phase: v1alpha1.PhaseRunning, ObservedGeneration: 1, AssignedPod: info.GetPodName(), NodeName: info.GetNodeName(),
		SandboxID: r.GetContainerId(), Endpoints: r.GetEndpoints(), Attempt: 1, StartTime: &now, StartPath: v1alpha1.StartPathSlot,
	}
	for _, t := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionScheduled} {
		sb.Status.Conditions = append(sb.Status.Conditions, metav1.Condition{
			Type: t, Status: metav1.ConditionTrue, Reason: "Running", LastTransitionTime: metav1.NewTime(now.Time), ObservedGeneration: 1,
		})
	}
	return sb
}

// request asks for a sandbox with a port that hardly any other has.
func request() *sandboxv1.CreateSandboxRequest {
	return &sandboxv1.CreateSandboxRequest{
		Namespace: namespace, Name: "load-" + uuid.NewString()[:18], RequestId: uuid.NewString(), Spec: spec(20000 + rand.Int32N(20000)),
	}
}

// finalize stands for the controller until ctx ends: it lets a Sandbox go that is being deleted. The allocator deletes the
// container before the custom resource.
func (w *world) finalize(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := w.finalizeOnce(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// finalizeOnce works for as long as one watch lasts.
func (w *world) finalizeOnce(ctx context.Context) error {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("SandboxList"))
	if err := w.kube.List(ctx, list, client.InNamespace(namespace), client.Limit(1)); err != nil {
		return fmt.Errorf("listing sandboxes: %w", err)
	}
	events, err := w.kube.Watch(ctx, list, client.InNamespace(namespace), &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.ResourceVersion}})
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
		if err := w.kube.Patch(ctx, sb, patch); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("letting a sandbox go: %w", err)
		}
	}
	return nil
}
