package persistence

import (
	"maps"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/idempotency"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// CreateDigest returns the digest of what a create call requests. Custom resources carry it as AnnotationRequestDigest.
func CreateDigest(labels map[string]string, spec *sandboxv1.SandboxSpec) string {
	return idempotency.Digest(struct {
		Labels map[string]string    `json:"labels,omitempty"`
		Spec   v1alpha1.SandboxSpec `json:"spec"`
	}{labels, convert.SpecFromProto(spec)})
}

// StrongResource returns the custom resource of a sandbox that the controller is to schedule and start.
func StrongResource(record *agentv1.SandboxRecord) *v1alpha1.Sandbox {
	labels := map[string]string{v1alpha1.LabelPool: record.GetSpec().GetPool()}
	maps.Copy(labels, record.GetLabels())
	annotations := map[string]string{
		v1alpha1.AnnotationCreateTime:    record.GetCreateTime().AsTime().Format(time.RFC3339Nano),
		v1alpha1.AnnotationRequestDigest: CreateDigest(record.GetLabels(), record.GetSpec()),
	}
	if record.GetRequestId() != "" {
		annotations[v1alpha1.AnnotationRequestID] = record.GetRequestId()
	}
	if record.GetTraceparent() != "" {
		annotations[v1alpha1.AnnotationTraceparent] = record.GetTraceparent()
	}
	sb := &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: record.GetNamespace(), Name: record.GetName(), Labels: labels, Annotations: annotations,
			Finalizers: []string{v1alpha1.Finalizer},
		},
		Spec: convert.SpecFromProto(record.GetSpec()),
	}
	sb.Spec.ConsistencyMode = v1alpha1.ConsistencyModeStrong
	return sb
}

// FastResource returns the custom resource of a sandbox that an agent runs already. The controller alone writes its status,
// which it derives from the assignment and what the agent reported with the start.
func FastResource(r *store.Record) *v1alpha1.Sandbox {
	sb := StrongResource(r.Record)
	fence := r.Record.GetFence()
	sb.Spec.ConsistencyMode = v1alpha1.ConsistencyModeFast
	sb.Annotations[v1alpha1.AnnotationSandboxUID] = fence.GetSandboxUid()
	if len(validation.IsValidLabelValue(r.NodeName)) == 0 { // a node's name may be longer than a label's value
		sb.Labels[v1alpha1.LabelNode] = r.NodeName
	}
	sb.SetAssignment(&v1alpha1.Assignment{
		AgentPod: r.AgentPod, AgentUID: fence.GetAgentUid(), NodeName: r.NodeName, AgentAddress: r.AgentAddress,
		SandboxUID: fence.GetSandboxUid(), Attempt: fence.GetAttempt(), Started: startedOf(r.Report),
		Superseded: convert.SupersededFromProto(r.Record.GetSuperseded()),
	})
	return sb
}

// startedOf returns what an agent reported of a start; nil if it reported none.
func startedOf(r *agentv1.SandboxReport) *v1alpha1.Started {
	if r.GetStartTime() == nil {
		return nil
	}
	return &v1alpha1.Started{
		SandboxID: r.GetContainerId(), StartTime: metav1.NewMicroTime(r.GetStartTime().AsTime().Truncate(time.Microsecond)),
		StartPath: convert.StartPathFromProto(r.GetStartPath()), Endpoints: r.GetEndpoints(),
	}
}
