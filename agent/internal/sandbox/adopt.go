package sandbox

import (
	"context"
	"fmt"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

const adoptParallel = 8

// Adopt rebuilds the sandboxes from the runtime, once, before any call is taken. After an error it may be called again.
//
//	task      report  started or persisted   then
//	running   -       -                      RUNNING
//	stopped   -       -                      STOPPED, its end written down
//	none      yes     -                      STOPPED, as was written down
//	none      no      yes                    STOPPED: it was acknowledged and its process is lost
//	none      no      no                     removed: nobody was told of it
//	created   -       -                      removed: it never ran
//	claiming  -       -                      removed: nobody was told of it
//
// One whose attempt has a tombstone is deleted on, with its whole grace period again.
//
// A container whose labels or record cannot be read, or that is an older attempt beside a newer one, is removed if nobody
// was told of it; an unreadable one that was acknowledged is reported with what its labels tell. Slots of an earlier life,
// claimed by nobody or by halves, are removed in the background.
func (m *Manager) Adopt(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx)
	found, err := m.config.Runtime.List(ctx, map[string]string{
		identity.KeyManaged: "true", identity.KeyAgentUID: m.config.Info.GetPodUid(),
	})
	if err != nil {
		return fmt.Errorf("adopting sandboxes: %w", err)
	}
	entries, keep := map[string]*entry{}, map[string]bool{}
	states := map[string]runtime.Found{}
	var drop []runtime.Found
	for _, f := range found {
		e, why := m.recognise(f)
		if e == nil && m.config.Slots != nil && identity.IsSlotID(f.ID) {
			log.V(2).Info("removing a slot of an earlier life", "container", f.ID, "why", why)
			m.config.Slots.Drop(f.ID)
			continue
		}
		if e == nil {
			log.Info("removing a container that is no sandbox", "container", f.ID, "why", why)
			drop = append(drop, f)
			continue
		}
		states[f.ID] = f
		uid := e.record.GetFence().GetSandboxUid()
		if other, ok := entries[uid]; ok {
			if other.record.GetFence().GetAttempt() > e.record.GetFence().GetAttempt() {
				e, other = other, e
			}
			log.Info("removing an older attempt", "container", other.id)
			drop = append(drop, states[other.id])
			delete(keep, other.id)
		}
		entries[uid], keep[e.id] = e, true
	}
	if err := m.dropAll(ctx, drop); err != nil {
		return fmt.Errorf("adopting sandboxes: %w", err)
	}
	swept, err := m.config.Logs.Sweep(keep)
	if err != nil {
		return fmt.Errorf("adopting sandboxes: %w", err)
	}
	for id := range keep {
		m.config.Logs.Adopt(id)
	}
	if err := m.settleAll(ctx, entries, states, log); err != nil {
		return err
	}
	if err := m.takeOver(ctx, entries, log); err != nil {
		return err
	}
	log.Info("sandboxes adopted", "sandboxes", len(entries), "removed", len(drop), "logsRemoved", len(swept))
	return nil
}

// takeOver makes the entries the manager's own, and begins to follow those that run and to delete on what was deleted.
func (m *Manager) takeOver(ctx context.Context, entries map[string]*entry, log logr.Logger) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return errClosing()
	}
	for uid, e := range entries {
		m.sandboxes[uid] = e
		close(e.created)
		if e.report.GetState() == agentv1.SandboxState_SANDBOX_STATE_STOPPED {
			close(e.ended)
		} else {
			m.follow(ctx, e)
		}
		if g := m.graves[uid]; g != nil && g.attempt() >= e.record.GetFence().GetAttempt() {
			log.Info("deleting on what has a tombstone", "container", e.id)
			m.startDelete(ctx, e, g.request.GetGracePeriod())
		}
	}
	m.adopted = true
	m.tellPlaces()
	return nil
}

func (m *Manager) dropAll(ctx context.Context, drop []runtime.Found) error {
	var g errgroup.Group
	g.SetLimit(adoptParallel)
	for _, f := range drop {
		g.Go(func() error {
			if err := m.config.Runtime.Delete(ctx, f.ID); err != nil {
				return err
			}
			return m.config.Logs.Remove(f.ID)
		})
	}
	return g.Wait()
}

// settleAll writes the ends of those processes down that ended while no agent was there.
func (m *Manager) settleAll(ctx context.Context, entries map[string]*entry, states map[string]runtime.Found, log logr.Logger) error {
	var g errgroup.Group
	g.SetLimit(adoptParallel)
	for _, e := range entries {
		f := states[e.id]
		if f.Task == runtime.TaskRunning || (f.Task == runtime.TaskNone && f.Report != nil) {
			continue
		}
		g.Go(func() error {
			if f.Task == runtime.TaskStopped {
				exit, err := m.config.Runtime.Wait(ctx, e.id)
				if err != nil {
					return fmt.Errorf("adopting sandbox %s: %w", e.id, err)
				}
				describeExit(e.report, exit)
			} else {
				describeLost(e.report, m.clock.Now())
			}
			if err := m.finish(ctx, e, e.report); err != nil {
				log.Error(err, "keeping the end of a sandbox", "container", e.id)
			}
			return nil
		})
	}
	return g.Wait()
}

// recognise makes an entry of a container, or says why it is none. Nobody else knows the entry yet.
func (m *Manager) recognise(f runtime.Found) (*entry, string) {
	startedAt, started := m.config.Logs.StartedAt(f.ID)
	id, err := identity.Parse(f.Labels)
	switch {
	case err != nil:
		return nil, err.Error()
	case id.State == identity.StateSlot:
		return nil, "a slot of an earlier life of the agent"
	case !id.Fits(f.ID):
		return nil, "its id does not fit its labels"
	case f.Claiming:
		return nil, "its claim was cut off, and nobody was told of it"
	case f.Task == runtime.TaskCreated:
		return nil, "it was never started"
	case f.Task == runtime.TaskNone && f.Report == nil && !started && !id.Persisted:
		return nil, "it has no task and nobody was told of it"
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
	report := &agentv1.SandboxReport{State: agentv1.SandboxState_SANDBOX_STATE_RUNNING, StartTime: timestamppb.New(startedAt)}
	if f.Task == runtime.TaskNone && f.Report != nil {
		report = &agentv1.SandboxReport{}
		if err := f.Report.UnmarshalTo(report); err != nil {
			describeLost(report, f.CreatedAt)
		}
		report.State = agentv1.SandboxState_SANDBOX_STATE_STOPPED
	}
	report.Record, report.Persisted, report.Endpoints = record, id.Persisted, m.endpoints(record)
	report.StartPath = sandboxv1.StartPath_START_PATH_COLD
	if identity.IsSlotID(f.ID) {
		report.StartPath = sandboxv1.StartPath_START_PATH_SLOT
	}
	return newEntry(f.ID, record, report), ""
}

// decodeRecord reads the record and holds it against the labels.
func decodeRecord(f runtime.Found, id identity.Identity) (*agentv1.SandboxRecord, error) {
	if f.Record == nil {
		return nil, fmt.Errorf("its record is missing")
	}
	record := &agentv1.SandboxRecord{}
	if err := f.Record.UnmarshalTo(record); err != nil {
		return nil, fmt.Errorf("its record cannot be read: %w", err)
	}
	want := &agentv1.Fence{SandboxUid: id.SandboxUID, Attempt: id.Attempt, AgentUid: id.AgentUID}
	if !proto.Equal(record.GetFence(), want) {
		return nil, fmt.Errorf("its record does not fit its labels")
	}
	return record, nil
}
