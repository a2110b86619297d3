package mesh

import (
	"context"
	"fmt"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/google/uuid"
	"google.golang.org/protobuf/types/known/durationpb"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// Target is a sandbox of a tenant that others must neither see nor disturb.
type Target struct {
	Tenant *Tenant
	Name   string
	// RequestID is that of its create, UID, ContainerID and Attempt identify it, the others are its agent.
	RequestID, UID, ContainerID, AgentPod, AgentUID, AgentIP, NodeName string
	Attempt                                                            int64
	Endpoints                                                          []string

	pid uint32
}

// MakeTarget creates the sandbox and waits until it is written.
func (m *Mesh) MakeTarget(ctx context.Context, t *Tenant, name string, spec *sandboxv1.SandboxSpec) (*Target, error) {
	target := &Target{Tenant: t, Name: name, RequestID: uuid.NewString()}
	spec.Pool, spec.TerminationGracePeriod = t.Pool, durationpb.New(0)
	_, err := t.Sandboxes.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{Namespace: t.Namespace, Name: name, RequestId: target.RequestID, Spec: spec})
	if err != nil {
		return nil, fmt.Errorf("creating %s: %w", name, err)
	}
	err = Poll(ctx, SettleTime, func(ctx context.Context) error {
		box, err := t.Get(ctx, name)
		if err != nil {
			return err
		}
		st := box.GetStatus()
		if !st.GetPersisted() || st.GetPhase() != sandboxv1.Phase_PHASE_RUNNING || st.GetSandboxId() == "" {
			return fmt.Errorf("sandbox %s is %s", name, st)
		}
		target.UID, target.ContainerID, target.Attempt = box.GetUid(), st.GetSandboxId(), st.GetAttempt()
		target.AgentPod, target.NodeName, target.Endpoints = st.GetAssignedPod(), st.GetNodeName(), st.GetEndpoints()
		return nil
	})
	if err != nil {
		return nil, err
	}
	if err := m.agentOf(ctx, target); err != nil {
		return nil, err
	}
	target.pid, err = m.pid(ctx, target.ContainerID)
	return target, err
}

func (m *Mesh) agentOf(ctx context.Context, t *Target) error {
	agents, err := m.Agents(ctx, t.Tenant.Namespace, t.Tenant.Pool)
	if err != nil {
		return err
	}
	for _, a := range agents {
		if a.Name == t.AgentPod {
			t.AgentUID, t.AgentIP = string(a.UID), a.Status.PodIP
			return nil
		}
	}
	return fmt.Errorf("sandbox %s is on %s, which is no agent", t.Name, t.AgentPod)
}

func (m *Mesh) pid(ctx context.Context, id string) (uint32, error) {
	container, err := m.Node.LoadContainer(ctx, id)
	if err != nil {
		return 0, fmt.Errorf("looking for container %s: %w", id, err)
	}
	task, err := container.Task(ctx, nil)
	if err != nil {
		return 0, fmt.Errorf("looking for the task of container %s: %w", id, err)
	}
	st, err := task.Status(ctx)
	if err != nil || st.Status != containerd.Running {
		return 0, fmt.Errorf("the task of container %s is %s: %w", id, st.Status, err)
	}
	return task.Pid(), nil
}

// Harmed returns what has happened to the sandbox; empty if nothing has. It looks at the API, the API server and the node.
func (m *Mesh) Harmed(ctx context.Context, t *Target) string {
	box, err := t.Tenant.Get(ctx, t.Name)
	if err != nil {
		return "its tenant cannot read it: " + err.Error()
	}
	st := box.GetStatus()
	if box.GetUid() != t.UID || st.GetAttempt() != t.Attempt || st.GetSandboxId() != t.ContainerID || st.GetAssignedPod() != t.AgentPod ||
		st.GetPhase() != sandboxv1.Phase_PHASE_RUNNING || box.GetDeleteTime() != nil {
		return fmt.Sprintf("it is now %s", box)
	}
	var resource v1alpha1.Sandbox
	if err := m.Kube.Get(ctx, client.ObjectKey{Namespace: t.Tenant.Namespace, Name: t.Name}, &resource); err != nil {
		return "its resource cannot be read: " + err.Error()
	}
	if resource.DeletionTimestamp != nil {
		return "its resource is being deleted"
	}
	pid, err := m.pid(ctx, t.ContainerID)
	if err != nil {
		return err.Error()
	}
	if pid != t.pid {
		return fmt.Sprintf("its process is %d, it was %d", pid, t.pid)
	}
	return ""
}
