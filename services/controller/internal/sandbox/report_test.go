package sandbox

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
)

const (
	creating     = agentv1.SandboxState_SANDBOX_STATE_CREATING
	runningState = agentv1.SandboxState_SANDBOX_STATE_RUNNING
	stopped      = agentv1.SandboxState_SANDBOX_STATE_STOPPED
	failedState  = agentv1.SandboxState_SANDBOX_STATE_FAILED
	terminating  = agentv1.SandboxState_SANDBOX_STATE_TERMINATING
	terminated   = agentv1.SandboxState_SANDBOX_STATE_TERMINATED
)

func report(state agentv1.SandboxState) *agentv1.SandboxReport {
	return &agentv1.SandboxReport{State: state, ContainerId: "uid-1", StartTime: timestamppb.New(start), Record: &agentv1.SandboxRecord{
		Namespace: name.Namespace, Name: name.Name, Fence: &agentv1.Fence{SandboxUid: "uid", Attempt: 1, AgentUid: "agent-uid"}}}
}

func registered(address, pool string) agents.Agent {
	return agents.Agent{Agent: &allocatorv1.Agent{Address: address, Ready: true, Info: &agentv1.AgentInfo{PodUid: "agent-uid", Namespace: name.Namespace, Pool: pool}}}
}

// TestReports: the event of each report, for a sandbox that this controller creates, one that runs, and one of the fast path.
func TestReports(t *testing.T) {
	exit := func(code int32) *agentv1.SandboxReport {
		r := report(stopped)
		r.ExitCode = proto.Int32(code)
		return r
	}
	lost := report(stopped)
	lost.Reason = lifecycle.ReasonRuntimeLost
	recreated := func(s *v1alpha1.Sandbox) { s.Spec.FailurePolicy = v1alpha1.FailurePolicyAutoRecreate }
	failure := func(reason fault.Reason) *agentv1.SandboxReport {
		r := report(failedState)
		r.Reason = string(reason)
		return r
	}
	bound, running := []change{onAgent, inPhase(v1alpha1.PhaseBound)}, []change{onAgent, inPhase(v1alpha1.PhaseRunning)}
	fast := []change{onAgent, onFastPath, inPhase(v1alpha1.PhaseBound)}
	for _, tt := range []struct {
		name    string
		changes []change
		report  *agentv1.SandboxReport
		want    lifecycle.Event
		reason  string
	}{
		{"no report yet", bound, nil, lifecycle.Scheduled, ""},
		{"creating", bound, report(creating), lifecycle.AgentCreating, "Creating"},
		{"creating, late", running, report(creating), 0, ""}, // a reason would stay, because the phase does not change again
		{"running", bound, report(runningState), lifecycle.AgentRunning, ""},
		{"running, after it failed", []change{onAgent, inPhase(v1alpha1.PhaseFailed)}, report(runningState), 0, ""},
		{"completed", running, exit(0), lifecycle.AgentCompleted, "Completed"},
		{"crashed", running, exit(3), lifecycle.AgentCrashed, "Error"},
		{"ended with an unknown code", running, report(stopped), lifecycle.AgentCrashed, "Error"},
		{"its runtime ended", running, lost, lifecycle.AgentCrashed, "RuntimeLost"},
		{"its runtime ended, and the policy is AutoRecreate", append([]change{recreated}, running...), lost, lifecycle.RuntimeLost, "RuntimeLost"},
		{"crashed, and the policy is AutoRecreate", append([]change{recreated}, running...), exit(137), lifecycle.AgentCrashed, "Error"},
		{"its runtime ended, which was seen before", []change{recreated, onAgent, inPhase(v1alpha1.PhaseFailed)}, lost, lifecycle.AgentCrashed, "RuntimeLost"},
		{"invalid request", bound, failure(fault.ImageNotFound), lifecycle.AgentFailed, "ImageNotFound"},
		{"invalid request on the fast path", fast, failure(fault.ImageNotFound), lifecycle.AgentFailed, "ImageNotFound"},
		{"canceled on the fast path", fast, failure(fault.Cancelled), lifecycle.AgentFailed, camel(fault.Cancelled)},
		{"refused to another process", bound, failure(fault.SandboxTerminating), lifecycle.AgentRefused, "SandboxTerminating"},
		{"terminating", running, report(terminating), 0, ""},
		{"removed before it ran", bound, report(terminated), lifecycle.Scheduled, ""},
		{"removed on the fast path", fast, report(terminated), lifecycle.AgentTerminated, "ContainerGone"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t)
			if tt.report != nil {
				f.registry.reports[fence] = tt.report
			}
			x := targetOf(t, newSandbox(tt.changes...))
			seen, err := f.reportObserver().observe(t.Context(), x)
			require.NoError(t, err)
			require.Equal(t, tt.want, seen.event, "%s", seen.event)
			if tt.reason == "" {
				require.Nil(t, seen.cause)
				return
			}
			require.Equal(t, tt.reason, seen.cause.reason)
		})
	}
}

func TestRecordReport(t *testing.T) {
	st := &v1alpha1.SandboxStatus{}
	r := report(stopped)
	r.Endpoints, r.StartPath, r.FinishTime = []string{"1.2.3.4:80"}, sandboxv1.StartPath_START_PATH_SLOT, timestamppb.New(start.Add(1500*time.Nanosecond))
	recordReport(st, r)
	require.Equal(t, "uid-1", st.SandboxID)
	require.Equal(t, []string{"1.2.3.4:80"}, st.Endpoints)
	require.Equal(t, v1alpha1.StartPathSlot, st.StartPath)
	require.True(t, st.StartTime.Time.Equal(start))
	require.True(t, st.FinishTime.Time.Equal(start.Add(time.Microsecond)), "the API server keeps microseconds")
	require.Equal(t, int32(255), *st.ExitCode)
	recordReport(st, report(runningState))
	require.Nil(t, st.ExitCode)
	require.Nil(t, st.FinishTime)
}

func TestExitCause(t *testing.T) {
	r := report(stopped)
	require.Equal(t, &cause{"Completed", "the process ended with code 0"}, exitCause(r, 0))
	require.Equal(t, &cause{"Error", "the process ended with code 3"}, exitCause(r, 3))
	r.Reason, r.Message = "OOMKilled", "out of memory"
	require.Equal(t, &cause{"OOMKilled", "out of memory"}, exitCause(r, 137))
}

// TestMissingReport: the Registry has no report of a sandbox that should run, or says that it ended. The agent decides.
func TestMissingReport(t *testing.T) {
	snapshot := func(reports ...*agentv1.SandboxReport) *agentv1.AgentSnapshot {
		return &agentv1.AgentSnapshot{Sandboxes: reports}
	}
	otherAttempt := report(runningState)
	otherAttempt.Record.Fence.Attempt = 2
	otherSandbox := report(runningState)
	otherSandbox.Record.Name = "victim"
	running := inPhase(v1alpha1.PhaseRunning)
	for _, tt := range []struct {
		name            string
		changes         []change
		registry        *agentv1.SandboxReport
		unsynced        bool
		snapshot, fresh *agentv1.AgentSnapshot
		err             error
		want            lifecycle.Event
		requeue         time.Duration
	}{
		{name: "running", changes: []change{running}, snapshot: snapshot(report(runningState)), want: lifecycle.AgentRunning, requeue: timing.Requeue},
		{name: "running, the cached snapshot is older", changes: []change{running}, fresh: snapshot(report(runningState)), want: lifecycle.AgentRunning, requeue: timing.Requeue},
		{name: "removed", changes: []change{running}, snapshot: snapshot(otherAttempt), fresh: snapshot(otherAttempt), want: lifecycle.AgentTerminated},
		{name: "another sandbox has the fence", changes: []change{running}, snapshot: snapshot(otherSandbox), fresh: snapshot(otherSandbox), want: lifecycle.AgentTerminated},
		{name: "no answer", changes: []change{running}, err: errUnreachable, requeue: timing.Requeue},
		{name: "no Registry", changes: []change{running}, unsynced: true},
		{name: "an ended report of an earlier create", changes: []change{running}, registry: report(terminated), snapshot: snapshot(report(runningState)), want: lifecycle.AgentRunning, requeue: timing.Requeue},
		{name: "before the Registry has it", changes: []change{onFastPath}, want: lifecycle.AgentCreating, requeue: timing.Requeue},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t)
			f.registry.synced = !tt.unsynced
			if tt.registry != nil {
				f.registry.reports[fence] = tt.registry
			}
			f.agents.snapshot, f.agents.fresh, f.agents.snapshotErr = tt.snapshot, tt.fresh, tt.err
			seen, err := f.reportObserver().observe(t.Context(), targetOf(t, newSandbox(append([]change{onAgent}, tt.changes...)...)))
			require.NoError(t, err)
			require.Equal(t, tt.want, seen.event, "%s", seen.event)
			require.Equal(t, tt.requeue, seen.requeue)
		})
	}
}

// TestCreateOutcomes: the event of each outcome of a create call, at once and after the retry interval.
func TestCreateOutcomes(t *testing.T) {
	for _, tt := range []struct {
		name   string
		err    error
		want   lifecycle.Event
		later  lifecycle.Event // after the interval
		reason string
	}{
		{"already exists", failure(errdefs.ErrAlreadyExists, fault.SandboxExists), 0, 0, "SandboxExists"},
		{"invalid request", failure(errdefs.ErrInvalidArgument, fault.CommandNotFound), lifecycle.AgentFailed, lifecycle.AgentFailed, "CommandNotFound"},
		{"no capacity", failure(errdefs.ErrResourceExhausted, fault.NoCapacity), lifecycle.AgentRefused, lifecycle.AgentRefused, "NoCapacity"},
		{"draining", failure(errdefs.ErrUnavailable, fault.AgentDraining), lifecycle.AgentRefused, lifecycle.AgentRefused, "AgentDraining"},
		{"superseded", failure(errdefs.ErrFailedPrecondition, fault.LeaderSuperseded), 0, lifecycle.Scheduled, "Creating"},
		{"pull failed", failure(errdefs.ErrUnavailable, fault.ImagePullFailed), 0, lifecycle.Scheduled, "ImagePullFailed"},
		{"unknown", errors.New("broken"), 0, lifecycle.Scheduled, "Unknown"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, passed := range []time.Duration{0, timing.Requeue} {
				f := newFixture(t)
				o := f.reportObserver()
				o.creates.calls.recordFailure(name, fence, tt.err)
				x := targetOf(t, newSandbox(onAgent, inPhase(v1alpha1.PhaseBound)))
				x.now = start.Add(passed)
				seen, err := o.observe(t.Context(), x)
				require.NoError(t, err)
				want := tt.want
				if passed > 0 {
					want = tt.later
				}
				require.Equal(t, want, seen.event, "after %s: %s", passed, seen.event)
				require.Equal(t, tt.reason, seen.cause.reason)
				require.Positive(t, seen.requeue)
			}
		})
	}
}

func TestRefusalIsReportedOnce(t *testing.T) {
	f := newFixture(t)
	o := f.reportObserver()
	o.creates.calls.recordFailure(name, fence, failure(errdefs.ErrResourceExhausted, fault.NoCapacity))
	x := targetOf(t, newSandbox(onAgent, inPhase(v1alpha1.PhaseBound)))
	for range 3 { // while its removal is waited for
		seen, err := o.observe(t.Context(), x)
		require.NoError(t, err)
		require.Equal(t, lifecycle.AgentRefused, seen.event)
	}
	require.Equal(t, []string{"Warning NoCapacity agent agent-1 refused the sandbox, another agent is chosen: failed by the test"}, f.recorder.all())
	require.Equal(t, []string{"agent-uid"}, f.memory.excluded(name))
}

func TestRepeatedFailureMovesToAnotherAgent(t *testing.T) {
	f := newFixture(t)
	o := f.reportObserver()
	x := targetOf(t, newSandbox(onAgent, inPhase(v1alpha1.PhaseBound)))
	var events []lifecycle.Event
	for range maxCreateFailures {
		o.creates.calls.recordFailure(name, fence, failure(errdefs.ErrUnavailable, fault.ImagePullFailed).RetryIn(time.Second))
		f.clock.Step(time.Second)
		x.now = f.clock.Now()
		seen, err := o.observe(t.Context(), x)
		require.NoError(t, err)
		events = append(events, seen.event)
	}
	require.Equal(t, []lifecycle.Event{lifecycle.Scheduled, lifecycle.Scheduled, lifecycle.AgentRefused}, events)
	require.Equal(t, "ImagePullFailed", f.memory.lastError(name).reason)
}

// TestResponseBeforeTheReport: the response of a create counts until the Registry has the report, and for a limited time.
func TestResponseBeforeTheReport(t *testing.T) {
	f := newFixture(t)
	o := f.reportObserver()
	o.creates.calls.start(t.Context(), name, fence, "", func(context.Context, func(string)) (*agentv1.SandboxReport, error) {
		return report(runningState), nil
	})
	waitIdle(t, o.creates.calls)
	x := targetOf(t, newSandbox(onAgent, inPhase(v1alpha1.PhaseBound)))
	for _, known := range []*agentv1.SandboxReport{nil, report(creating), report(terminated)} {
		f.registry.reports[fence] = known
		seen, err := o.observe(t.Context(), x)
		require.NoError(t, err)
		require.Equal(t, lifecycle.AgentRunning, seen.event)
	}
	delete(f.registry.reports, fence)
	x.now = start.Add(timing.Requeue)
	seen, err := o.observe(t.Context(), x)
	require.NoError(t, err)
	require.Equal(t, lifecycle.Scheduled, seen.event, "created again: the container may be removed")
	_, ok := o.creates.calls.get(name, fence)
	require.False(t, ok)
}

func TestRunningCreate(t *testing.T) {
	for _, tt := range []struct {
		name   string
		phase  v1alpha1.Phase
		known  *agentv1.SandboxReport
		passed time.Duration
		stage  agentv1.CreateStage
		want   lifecycle.Event
		reason string
	}{
		{"just started", v1alpha1.PhaseBound, nil, 0, 0, lifecycle.AgentCreating, "Creating"},
		{"not answering", v1alpha1.PhaseBound, nil, timing.Requeue, 0, lifecycle.AgentCreating, "AgentNotAnswering"},
		{"pulling", v1alpha1.PhaseBound, nil, timing.Requeue, agentv1.CreateStage_CREATE_STAGE_ADMITTED, lifecycle.AgentCreating, "PullingImage"},
		{"reported as running", v1alpha1.PhaseBound, report(runningState), 0, 0, lifecycle.AgentRunning, ""},
		{"phase Running", v1alpha1.PhaseRunning, nil, 0, 0, 0, "Creating"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t)
			o := f.reportObserver()
			started := make(chan struct{})
			o.creates.calls.start(t.Context(), name, fence, "", func(ctx context.Context, stage func(string)) (*agentv1.SandboxReport, error) {
				if tt.stage != 0 {
					stage(tt.stage.String())
				}
				close(started)
				<-ctx.Done()
				return nil, ctx.Err()
			})
			<-started
			if tt.known != nil {
				f.registry.reports[fence] = tt.known
			}
			x := targetOf(t, newSandbox(onAgent, inPhase(tt.phase)))
			x.now = start.Add(tt.passed)
			seen, err := o.observe(t.Context(), x)
			require.NoError(t, err)
			require.Equal(t, tt.want, seen.event)
			if tt.reason != "" {
				require.Equal(t, tt.reason, seen.cause.reason)
			}
		})
	}
}
