package sandbox

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// recognize makes an entry of a container, or returns why it is none. started is whether, and startedAt when, the log says
// that the process was started; ip is the agent Pod's.
func recognize(f runtime.Found, started bool, startedAt time.Time, ip string) (*entry, string) {
	id, err := identity.Parse(f.Labels)
	switch {
	case err != nil:
		return nil, err.Error()
	case id.State == identity.StateSlot:
		return nil, "a slot of an earlier agent process"
	case !id.Fits(f.ID):
		return nil, "its id does not fit its labels"
	case f.Claiming:
		return nil, "its claim was interrupted, and it was never acknowledged"
	case f.Task == runtime.TaskCreated:
		return nil, "it was never started"
	case f.Task == runtime.TaskNone && f.Report == nil && !started && !id.Persisted:
		return nil, "it has no task and was never acknowledged"
	}
	record, err := decodeRecord(f, id)
	if err != nil {
		if !started && !id.Persisted {
			return nil, err.Error()
		}
		record = &agentv1.SandboxRecord{
			Fence:     &agentv1.Fence{SandboxUid: id.SandboxUID, Attempt: id.Attempt, AgentUid: id.AgentUID},
			Namespace: id.Namespace, Name: id.Name, CreateTime: timestamppb.New(f.CreatedAt),
		}
	}
	if !started {
		startedAt = f.CreatedAt
	}
	report := &agentv1.SandboxReport{State: stateRunning, StartTime: timestamppb.New(startedAt)}
	if f.Task == runtime.TaskNone && f.Report != nil {
		report = &agentv1.SandboxReport{}
		if err := f.Report.UnmarshalTo(report); err != nil {
			describeLost(report, f.CreatedAt)
		}
		report.State = stateStopped
	}
	report.Persisted, report.Endpoints = id.Persisted, endpoints(ip, record)
	report.StartPath = sandboxv1.StartPath_START_PATH_COLD
	if identity.IsSlotID(f.ID) {
		report.StartPath = sandboxv1.StartPath_START_PATH_SLOT
	}
	return newEntry(f.ID, record, report), ""
}

// decodeRecord reads the record and compares it with the labels.
func decodeRecord(f runtime.Found, id identity.Identity) (*agentv1.SandboxRecord, error) {
	if f.Record == nil {
		return nil, errors.New("its record is missing")
	}
	record := &agentv1.SandboxRecord{}
	if err := f.Record.UnmarshalTo(record); err != nil {
		return nil, fmt.Errorf("its record cannot be read: %w", err)
	}
	if identity.FenceOf(record.GetFence()) != id.Fence() {
		return nil, errors.New("its record does not fit its labels")
	}
	return record, nil
}
