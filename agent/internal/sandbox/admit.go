package sandbox

import (
	"context"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/terms"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// minMemory is less than any OCI runtime can start a process in.
const minMemory = 4 << 20

// admit takes a sandbox in, or finds the one that is there. It returns the entry, which the caller then waits on, or a
// channel to wait on before it asks again, or why the sandbox is refused. mu is held.
func (m *Manager) admit(ctx context.Context, caller *terms.Caller, record *agentv1.SandboxRecord, persisted bool) (*entry, <-chan struct{}, error) {
	fence := record.GetFence()
	if err := m.checkAgent(fence); err != nil {
		return nil, nil, err
	}
	if err := m.ready(); err != nil {
		return nil, nil, err
	}
	if err := m.inForce(caller); err != nil {
		return nil, nil, err
	}
	if e, ok := m.sandboxes[fence.GetSandboxUid()]; ok {
		return m.meet(e, record)
	}
	switch buried := m.buried(fence.GetSandboxUid()); {
	case fence.GetAttempt() == buried:
		return nil, nil, errTerminating(fence)
	case fence.GetAttempt() < buried:
		return nil, nil, mismatch(fence, buried)
	}
	if m.draining {
		return nil, nil, fault.New(errdefs.ErrUnavailable, fault.AgentDraining, "the agent takes no sandboxes: it is drained")
	}
	if !m.accepting {
		return nil, nil, fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "the agent takes no sandboxes: %s", m.notReady)
	}
	if capacity := int(m.config.Info.GetCapacity()); len(m.sandboxes) >= capacity {
		return nil, nil, fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "all %d places of the agent are taken", capacity).
			RetryIn(noCapacityRetry)
	}
	if err := m.checkPorts(record); err != nil {
		return nil, nil, err
	}
	return m.take(ctx, record, persisted), nil, nil
}

// meet deals with a create whose sandbox is known in some attempt. mu is held.
func (m *Manager) meet(e *entry, record *agentv1.SandboxRecord) (*entry, <-chan struct{}, error) {
	fence, in := record.GetFence(), e.record.GetFence().GetAttempt()
	state := e.report.GetState()
	leaving := state == agentv1.SandboxState_SANDBOX_STATE_FAILED || e.deletion != nil
	switch {
	case fence.GetAttempt() < in:
		return nil, nil, mismatch(fence, in)
	case fence.GetAttempt() > in && leaving:
		return nil, e.gone, nil
	case fence.GetAttempt() > in:
		return nil, nil, mismatch(fence, in)
	case e.deletion != nil:
		return nil, nil, errTerminating(fence)
	case state == agentv1.SandboxState_SANDBOX_STATE_FAILED:
		return nil, e.gone, nil
	case !sameRecord(e.record, record):
		return nil, nil, fault.New(errdefs.ErrAlreadyExists, fault.SandboxExists,
			"attempt %d of sandbox %s exists with another record", in, fence.GetSandboxUid())
	}
	return e, nil, nil
}

// sameRecord compares what was asked for; a retry may be part of another trace.
func sameRecord(a, b *agentv1.SandboxRecord) bool {
	if a.GetTraceparent() != b.GetTraceparent() {
		b, _ = proto.Clone(b).(*agentv1.SandboxRecord)
		b.Traceparent = a.GetTraceparent()
	}
	return proto.Equal(a, b)
}

func errTerminating(f *agentv1.Fence) error {
	return fault.New(errdefs.ErrAborted, fault.SandboxTerminating, "attempt %d of sandbox %s is being deleted", f.GetAttempt(), f.GetSandboxUid())
}

// checkPorts refuses ports that are the agent's own or another sandbox's. mu is held.
func (m *Manager) checkPorts(record *agentv1.SandboxRecord) error {
	if network(record) == runtime.NetworkNone {
		return nil
	}
	for _, port := range record.GetSpec().GetPorts() {
		if slices.Contains(m.config.Info.GetReservedPorts(), port) {
			return fault.New(errdefs.ErrResourceExhausted, fault.PortConflict, "port %d is the agent's own", port)
		}
		for _, e := range m.sandboxes {
			if network(e.record) == runtime.NetworkAgent && slices.Contains(e.record.GetSpec().GetPorts(), port) {
				return fault.New(errdefs.ErrResourceExhausted, fault.PortConflict, "port %d is taken by sandbox %s/%s",
					port, e.record.GetNamespace(), e.record.GetName()).RetryIn(noCapacityRetry)
			}
		}
	}
	return nil
}

func network(r *agentv1.SandboxRecord) runtime.Network {
	if r.GetSpec().GetNetwork() == sandboxv1.NetworkMode_NETWORK_MODE_NONE {
		return runtime.NetworkNone
	}
	return runtime.NetworkAgent
}

// validate refuses what no runtime could run, beyond what protovalidate has seen already.
func validate(r *agentv1.SandboxRecord) error {
	spec := r.GetSpec()
	if _, err := runtime.NormalizeImage(spec.GetImage()); err != nil {
		return err
	}
	if network(r) == runtime.NetworkNone && len(spec.GetPorts()) > 0 {
		return fault.Field("spec.ports", "a sandbox without a network can listen on no port")
	}
	for field, values := range map[string][]string{"spec.command": spec.GetCommand(), "spec.args": spec.GetArgs(), "spec.working_dir": {spec.GetWorkingDir()}} {
		if slices.ContainsFunc(values, func(s string) bool { return strings.ContainsRune(s, 0) }) {
			return fault.Field(field, "a zero byte cannot be passed to a process")
		}
	}
	for key, value := range spec.GetEnv() {
		if strings.ContainsRune(key+value, 0) {
			return fault.Field("spec.env", "a zero byte cannot be passed to a process")
		}
	}
	if mem := limits(r).MemoryBytes; mem > 0 && mem < minMemory {
		return fault.Field("limits.memory_bytes", "%d bytes are too few to start a process in, want at least %d", mem, minMemory)
	}
	return nil
}

func limits(r *agentv1.SandboxRecord) runtime.Limits {
	l := r.GetLimits()
	if l == nil {
		l = r.GetSpec().GetResources()
	}
	return runtime.Limits{CPUMillis: l.GetCpuMillis(), MemoryBytes: l.GetMemoryBytes(), PIDs: l.GetPids()}
}
