package sandbox

import (
	"context"
	"errors"
	"net"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// Why the assignment of a Sandbox is not followed. Users can write annotations, so that an assignment is input and no evidence.
var (
	errOtherUID       = errors.New("annotation " + v1alpha1.AnnotationAssignment + ": sandboxUID is not the uid of this sandbox")
	errOtherNamespace = errors.New("annotation " + v1alpha1.AnnotationAssignment + ": the agent is in another namespace")
	errOtherContainer = errors.New("annotation " + v1alpha1.AnnotationAssignment + ": the container is that of another sandbox")
)

// verify returns an error if the assignment names an agent or a container that cannot be the sandbox's. It contradicts an assignment by
// what the Registry knows; what it does not know, the agent refuses.
func (a *agentAccess) verify(t *target) error {
	if t.assignment == nil {
		return nil
	}
	if t.assignment.SandboxUID != t.sandbox.EffectiveUID() {
		return errOtherUID
	}
	if agent, ok := a.index.Agent(t.assignment.AgentUID); ok && agent.GetInfo().GetNamespace() != t.name.Namespace {
		return errOtherNamespace
	}
	if report := a.index.Report(t.fence()); report != nil && !named(report, t.name) {
		return errOtherContainer
	}
	return nil
}

// named reports whether an agent's report is about a container of a sandbox's name.
func named(report *agentv1.SandboxReport, name types.NamespacedName) bool {
	return report.GetRecord().GetNamespace() == name.Namespace && report.GetRecord().GetName() == name.Name
}

// address returns the address of the fence's agent; empty if it has none. The Registry's address is preferred to that of the
// assignment, because the Pod may have another one after its sandbox was recreated by the kubelet. An address of the assignment counts
// only if the agent's Pod, in the namespace of the sandbox, has its IP: users can write any address there.
func (a *agentAccess) address(ctx context.Context, namespace string, f identity.Fence, assignment *v1alpha1.Assignment) string {
	if agent, ok := a.index.Agent(f.AgentUID); ok && agent.GetAddress() != "" && agent.GetInfo().GetNamespace() == namespace {
		return agent.GetAddress()
	}
	if assignment == nil || assignment.AgentUID != f.AgentUID {
		return ""
	}
	host, _, err := net.SplitHostPort(assignment.AgentAddress)
	var pod corev1.Pod
	if err != nil || a.client.Get(ctx, types.NamespacedName{Namespace: namespace, Name: assignment.AgentPod}, &pod) != nil {
		return ""
	}
	if string(pod.UID) != f.AgentUID || pod.Status.PodIP != host {
		return ""
	}
	return assignment.AgentAddress
}
