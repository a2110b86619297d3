package sandbox

import (
	"net"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/launch"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/terms"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// entry is one sandbox. The manager's lock guards its fields, except those of the first group.
type entry struct {
	record *agentv1.SandboxRecord
	fence  identity.Fence
	// id is the container's. The create sets it, to a slot's if it claims one; it is fixed once created is closed.
	id string

	// report is replaced, never modified: watchers hold it.
	report *agentv1.SandboxReport
	// changed is closed, and replaced, whenever stages or an outcome change.
	changed chan struct{}

	// creation is the create that runs or has run; deletion the delete, nil if there is none.
	creation
	deletion *deletion

	// ending is why the agent has ended the process by itself; nil if it has not.
	ending *ending

	// ended is closed once the process has ended and all its output is in its log, the container is gone, or the create was
	// abandoned.
	ended chan struct{}
	// gone is closed once nothing is left of the sandbox.
	gone chan struct{}
}

// creation is the create of a sandbox: its stages, the callers that wait for it, how to cancel it, whether a new leader
// canceled it, and, once created is closed, its outcome.
type creation struct {
	stages     []StageTiming
	callers    map[*terms.Caller]struct{}
	cancel     func()
	superseded bool
	created    chan struct{}
	createErr  error
}

// StageTiming is a stage of a create that was reached, and the time spent in it alone.
type StageTiming struct {
	Stage    agentv1.CreateStage
	Duration time.Duration
}

func newEntry(id string, record *agentv1.SandboxRecord, report *agentv1.SandboxReport) *entry {
	report.ContainerId, report.Record = id, record
	return &entry{
		record: record, fence: identity.FenceOf(record.GetFence()), id: id, report: report, changed: make(chan struct{}),
		creation: creation{callers: map[*terms.Caller]struct{}{}, cancel: func() {}, created: make(chan struct{})},
		ended:    make(chan struct{}), gone: make(chan struct{}),
	}
}

// name returns the namespace and name of the sandbox, for logs.
func (e *entry) name() string { return e.record.GetNamespace() + "/" + e.record.GetName() }

// wake wakes every call that waits on the entry.
func (e *entry) wake() {
	close(e.changed)
	e.changed = make(chan struct{})
}

// change replaces the report by a changed copy.
func (e *entry) change(f func(*agentv1.SandboxReport)) {
	report, _ := proto.Clone(e.report).(*agentv1.SandboxReport)
	f(report)
	e.report = report
	e.wake()
}

// reach appends a stage of the create.
func (e *entry) reach(s StageTiming) {
	e.stages = append(e.stages, s)
	e.wake()
}

// leave removes a caller, and cancels a create that no caller waits for. It reports whether it did.
func (e *entry) leave(caller *terms.Caller) bool {
	delete(e.callers, caller)
	if len(e.callers) > 0 || isClosed(e.created) {
		return false
	}
	e.cancel()
	return true
}

// holdsCapacity reports whether the sandbox takes up one of the agent's capacity units, and its ports. It does until its
// process has ended; a create that failed does until it is cleaned up or abandoned.
func (e *entry) holdsCapacity() bool { return !isClosed(e.ended) }

// holdsPort reports whether the sandbox may listen on a port of the agent's network.
func (e *entry) holdsPort(port int32) bool {
	return e.holdsCapacity() && launch.Network(e.record) == runtime.NetworkAgent && slices.Contains(e.record.GetSpec().GetPorts(), port)
}

// endpoints returns the addresses of a sandbox's ports.
func endpoints(ip string, record *agentv1.SandboxRecord) []string {
	if launch.Network(record) == runtime.NetworkNone {
		return nil
	}
	var out []string
	for _, port := range record.GetSpec().GetPorts() {
		out = append(out, net.JoinHostPort(ip, strconv.Itoa(int(port))))
	}
	return out
}

// closeOnce closes a channel that may be closed already. The callers of one channel are in order.
func closeOnce(ch chan struct{}) {
	if !isClosed(ch) {
		close(ch)
	}
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}
