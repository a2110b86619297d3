package sandbox

import (
	"context"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/launch"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/terms"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// minMemory is less than any OCI runtime can start a process in.
const minMemory = 4 << 20

// admission is the answer to a create: exactly one field is set.
type admission struct {
	// entry is the sandbox, new or found, whose create the caller waits for.
	entry *entry
	// wait is closed when the caller should ask again.
	wait <-chan struct{}
	// refused is why there will be no sandbox.
	refused error
}

func refuse(err error) admission { return admission{refused: err} }

// admit decides a create, and begins it if the sandbox is new. mu is held.
func (m *Manager) admit(ctx context.Context, caller *terms.Caller, record *agentv1.SandboxRecord, persisted bool) admission {
	fence := record.GetFence()
	if err := m.checkCall(caller, fence); err != nil {
		return refuse(err)
	}
	if err := m.checkRecord(record); err != nil {
		return refuse(err)
	}
	if e, ok := m.sandboxes[fence.GetSandboxUid()]; ok {
		return e.join(record)
	}
	switch deleted := m.tombstones.Latest(fence.GetSandboxUid()); {
	case fence.GetAttempt() == deleted:
		return refuse(errTerminating(fence))
	case fence.GetAttempt() < deleted:
		return refuse(errMismatch(fence, deleted))
	}
	if gone, ok := m.removingLate[identity.FenceOf(fence).ContainerID()]; ok {
		return admission{wait: gone}
	}
	if err := m.gate.refusal(); err != nil {
		return refuse(err)
	}
	if capacity := int(m.config.Info.GetCapacity()); m.sandboxes.inUse() >= capacity {
		return refuse(fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "all %d capacity units of the agent are in use", capacity).
			RetryIn(noCapacityRetry))
	}
	if err := m.checkPorts(record); err != nil {
		return refuse(err)
	}
	return admission{entry: m.begin(ctx, record, persisted)}
}

// join decides a create whose sandbox is known in some attempt.
func (e *entry) join(record *agentv1.SandboxRecord) admission {
	fence := record.GetFence()
	failed := e.report.GetState() == stateFailed
	switch {
	case fence.GetAttempt() > e.fence.Attempt && (failed || e.deletion != nil):
		return admission{wait: e.gone}
	case fence.GetAttempt() != e.fence.Attempt:
		return refuse(errMismatch(fence, e.fence.Attempt))
	case e.deletion != nil:
		return refuse(errTerminating(fence))
	case failed:
		return admission{wait: e.gone}
	case !sameRecord(e.record, record):
		return refuse(fault.New(errdefs.ErrAlreadyExists, fault.SandboxExists,
			"attempt %d of sandbox %s exists with another record", e.fence.Attempt, e.fence.SandboxUID))
	}
	return admission{entry: e}
}

// sameRecord compares what was asked for; a retry may belong to another trace.
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

// checkPorts refuses ports that the agent or another sandbox uses. mu is held.
func (m *Manager) checkPorts(record *agentv1.SandboxRecord) error {
	if launch.Network(record) == runtime.NetworkNone {
		return nil
	}
	for _, port := range record.GetSpec().GetPorts() {
		if slices.Contains(m.config.Info.GetReservedPorts(), port) {
			return fault.New(errdefs.ErrResourceExhausted, fault.PortConflict, "port %d is the agent's own", port)
		}
		if e := m.sandboxes.portHolder(port); e != nil {
			return fault.New(errdefs.ErrResourceExhausted, fault.PortConflict, "port %d is in use by sandbox %s", port, e.name()).
				RetryIn(noCapacityRetry)
		}
	}
	return nil
}

// validate refuses what no runtime could run, or the pool does not allow, beyond what protovalidate has checked already.
func (m *Manager) validate(r *agentv1.SandboxRecord) error {
	spec := r.GetSpec()
	if _, err := runtime.NormalizeImage(spec.GetImage()); err != nil {
		return err
	}
	if launch.Network(r) == runtime.NetworkNone && len(spec.GetPorts()) > 0 {
		return fault.Field("spec.ports", "a sandbox without a network can listen on no port")
	}
	if spec.GetKeepAlive() && len(spec.GetCommand())+len(spec.GetArgs()) > 0 {
		return fault.Field("spec.keep_alive", "a sandbox that is kept alive has no process of its own: command and args must be empty")
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
	limits := launch.Limits(r)
	if err := limits.Check("limits", m.config.MaxLimits); err != nil {
		return err
	}
	if memory := limits.MemoryBytes; memory > 0 && memory < minMemory {
		return fault.Field("limits.memory_bytes", "%d bytes are too few to start a process in, want at least %d", memory, minMemory)
	}
	return nil
}
