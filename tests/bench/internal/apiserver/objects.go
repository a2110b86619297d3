package apiserver

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// Agent makes the Pod of an agent that runs, of the namespace, pool, Pod's name, node and IP address in info, and sets the
// Pod's uid there.
func (s *Server) Agent(ctx context.Context, info *agentv1.AgentInfo) error {
	pool := &v1alpha1.SandboxPool{}
	err := s.Kube.Get(ctx, client.ObjectKey{Namespace: info.GetNamespace(), Name: info.GetPool()}, pool)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("reading the pool of an agent's Pod: %w", err)
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: info.GetNamespace(), Name: info.GetPodName(),
			Labels: map[string]string{v1alpha1.LabelComponent: v1alpha1.ComponentAgent, v1alpha1.LabelPool: info.GetPool()},
		},
		Spec: corev1.PodSpec{NodeName: info.GetNodeName(), Containers: []corev1.Container{{Name: "agent", Image: "agent"}}},
	}
	if pool.UID != "" { // the allocator takes no other Pod for an agent's
		pod.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(pool, v1alpha1.GroupVersion.WithKind("SandboxPool"))}
	}
	if err := s.Kube.Create(ctx, pod); err != nil {
		return fmt.Errorf("making an agent's Pod: %w", err)
	}
	pod.Status.Phase, pod.Status.PodIP, pod.Status.PodIPs = corev1.PodRunning, info.GetPodIp(), []corev1.PodIP{{IP: info.GetPodIp()}}
	if err := s.Kube.Status().Update(ctx, pod); err != nil {
		return fmt.Errorf("setting the status of an agent's Pod: %w", err)
	}
	info.PodUid = string(pod.UID)
	return nil
}

// Sandbox is the custom resource of a sandbox that runs, as allocator and controller would have written it; port is where its
// agent listens.
func Sandbox(info *agentv1.AgentInfo, r *agentv1.SandboxReport, port int) *v1alpha1.Sandbox {
	record := r.GetRecord()
	sb := &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: record.GetNamespace(), Name: record.GetName(), Finalizers: []string{v1alpha1.Finalizer},
			Labels: map[string]string{v1alpha1.LabelPool: record.GetSpec().GetPool(), v1alpha1.LabelNode: info.GetNodeName()},
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
