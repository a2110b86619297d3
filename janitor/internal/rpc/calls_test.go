package rpc_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
	janitorrpc "github.com/fast-sandbox/fast-sandbox/janitor/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// TestEnumsMatchTheVerdicts: every value of package verdict has a value of the API, and the reverse.
func TestEnumsMatchTheVerdicts(t *testing.T) {
	for name, e := range map[string]struct {
		values map[string]int32
		prefix string
		word   func(int) string
		end    string
		apart  []string // values of the API without a counterpart
	}{
		"action":    {janitorv1.Action_value, "ACTION_", func(i int) string { return verdict.Action(i).String() }, "invalid", nil},
		"reason":    {janitorv1.Reason_value, "REASON_", func(i int) string { return verdict.Reason(i).String() }, "unknown", nil},
		"container": {janitorv1.ContainerState_value, "CONTAINER_STATE_", func(i int) string { return verdict.Container(i).String() }, "invalid", nil},
		"agent":     {janitorv1.AgentState_value, "AGENT_STATE_", func(i int) string { return verdict.Agent(i).String() }, "invalid", nil},
		"resource":  {janitorv1.ResourceState_value, "RESOURCE_STATE_", func(i int) string { return verdict.ResourceState(i).String() }, "invalid", nil},
		"fence":     {janitorv1.FenceOutcome_value, "FENCE_OUTCOME_", func(i int) string { return verdict.Fence(i).String() }, "invalid", nil},
		"kind":      {janitorv1.RemnantKind_value, "REMNANT_KIND_", func(i int) string { return verdict.Kind(i).String() }, "invalid", nil},
	} {
		t.Run(name, func(t *testing.T) {
			count := 0
			for ; e.word(count) != e.end; count++ {
				value := e.prefix + strings.ToUpper(strings.ReplaceAll(e.word(count), "-", "_"))
				require.NotZero(t, e.values[value], value)
			}
			require.NotZero(t, count)
			require.Len(t, e.values, count+1, "and the unspecified one")
		})
	}
}

func TestListVerdicts(t *testing.T) {
	slot := claimed("slot.1")
	slot.Identity = verdictSlot()
	torn := &verdict.Observation{ContainerID: "torn", Managed: true, Container: verdict.NoTask, Defect: "attempt is missing", Age: -time.Second}
	waiting := claimed("c")
	waiting.Resource, waiting.Missing = verdict.Resource{State: verdict.ResourceAbsent}, 3*time.Second
	client := serve(t, newCore(
		judged(waiting), judged(claimed("b")), judged(slot), judged(torn), judged(orphan("a")),
		left(&verdict.Remnant{ContainerID: "c", Kind: verdict.Log, Deleted: true, DeletedAge: time.Minute, Agent: verdict.AgentGone}),
		left(&verdict.Remnant{ContainerID: "c", Kind: verdict.Snapshot, Since: time.Hour}),
	), nil)
	got, err := client.ListVerdicts(t.Context(), &janitorv1.ListVerdictsRequest{})
	require.NoError(t, err)
	var words []string
	for _, v := range got.GetVerdicts() {
		require.Equal(t, "node-1", v.GetNodeName())
		require.True(t, v.GetTime().AsTime().Equal(now))
		words = append(words, v.GetContainerId()+" "+v.GetAction().String()+" "+v.GetReason().String())
	}
	require.Equal(t, []string{
		"a ACTION_DELETE REASON_AGENT_POD_GONE", "b ACTION_KEEP REASON_ASSIGNED", "c ACTION_WAIT REASON_WITHIN_GRACE",
		"c ACTION_DELETE REASON_LEFTOVER", "c ACTION_WAIT REASON_LOG_RETAINED",
		"slot.1 ACTION_KEEP REASON_SLOT_OF_AGENT", "torn ACTION_KEEP REASON_UNIDENTIFIED",
	}, words)

	for name, tc := range map[string]struct {
		request *janitorv1.ListVerdictsRequest
		want    int
	}{
		"action":  {&janitorv1.ListVerdictsRequest{Actions: []janitorv1.Action{janitorv1.Action_ACTION_DELETE}}, 2},
		"actions": {&janitorv1.ListVerdictsRequest{Actions: []janitorv1.Action{janitorv1.Action_ACTION_DELETE, janitorv1.Action_ACTION_WAIT}}, 4},
		"reason":  {&janitorv1.ListVerdictsRequest{Reasons: []janitorv1.Reason{janitorv1.Reason_REASON_ASSIGNED}}, 1},
		"both": {&janitorv1.ListVerdictsRequest{
			Actions: []janitorv1.Action{janitorv1.Action_ACTION_DELETE}, Reasons: []janitorv1.Reason{janitorv1.Reason_REASON_ASSIGNED}}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := client.ListVerdicts(t.Context(), tc.request)
			require.NoError(t, err)
			require.Len(t, got.GetVerdicts(), tc.want)
		})
	}
}

// TestEvidence: everything that a verdict is based on is sent.
func TestEvidence(t *testing.T) {
	unclaimed := claimed("slot.1")
	unclaimed.Identity, unclaimed.Resource = verdictSlot(), verdict.Resource{}
	client := serve(t, newCore(
		judged(claimed("a")), judged(unclaimed),
		left(&verdict.Remnant{ContainerID: "b", Kind: verdict.Log, Deleted: true, DeletedAge: time.Minute, Since: time.Second, Agent: verdict.AgentGone}),
		left(&verdict.Remnant{ContainerID: "c", Kind: verdict.Cgroup, Since: time.Hour}),
	), nil)
	got, err := client.ListVerdicts(t.Context(), &janitorv1.ListVerdictsRequest{})
	require.NoError(t, err)
	common := func(id string, a janitorv1.Action, r janitorv1.Reason) *janitorv1.Verdict {
		return &janitorv1.Verdict{NodeName: "node-1", ContainerId: id, Action: a, Reason: r, Time: timestamppb.New(now)}
	}
	kept := common("a", janitorv1.Action_ACTION_KEEP, janitorv1.Reason_REASON_ASSIGNED)
	kept.Evidence = &janitorv1.Verdict_Observation{Observation: &janitorv1.Observation{
		Managed: true, State: janitorv1.ContainerState_CONTAINER_STATE_RUNNING, Age: durationpb.New(time.Minute),
		Agent: janitorv1.AgentState_AGENT_STATE_ALIVE, Missing: durationpb.New(0), Fence: janitorv1.FenceOutcome_FENCE_OUTCOME_MATCH,
		Identity: &janitorv1.ContainerIdentity{
			Namespace: "ns", Name: "sb", SandboxUid: "u-a", Attempt: 2, AgentUid: "agent", Pool: "pool", Persisted: true,
		},
		Resource: &janitorv1.Resource{
			State: janitorv1.ResourceState_RESOURCE_STATE_PRESENT, Uid: "u-a", Assignment: &janitorv1.Assignment{AgentUid: "agent", Attempt: 2},
		},
	}}
	retained := common("b", janitorv1.Action_ACTION_WAIT, janitorv1.Reason_REASON_LOG_RETAINED)
	retained.Evidence = &janitorv1.Verdict_Remnant{Remnant: &janitorv1.Remnant{
		Kind: janitorv1.RemnantKind_REMNANT_KIND_LOG, Since: durationpb.New(time.Second), Agent: janitorv1.AgentState_AGENT_STATE_GONE,
		Deleted: true, DeletedAge: durationpb.New(time.Minute),
	}}
	slot := common("slot.1", janitorv1.Action_ACTION_KEEP, janitorv1.Reason_REASON_SLOT_OF_AGENT)
	slot.Evidence = &janitorv1.Verdict_Observation{Observation: &janitorv1.Observation{
		Managed: true, State: janitorv1.ContainerState_CONTAINER_STATE_RUNNING, Age: durationpb.New(time.Minute),
		Agent:    janitorv1.AgentState_AGENT_STATE_ALIVE,
		Identity: &janitorv1.ContainerIdentity{AgentUid: "agent", Pool: "pool", Slot: true},
	}}
	leftover := common("c", janitorv1.Action_ACTION_DELETE, janitorv1.Reason_REASON_LEFTOVER)
	leftover.Evidence = &janitorv1.Verdict_Remnant{Remnant: &janitorv1.Remnant{
		Kind: janitorv1.RemnantKind_REMNANT_KIND_CGROUP, Since: durationpb.New(time.Hour),
	}}
	require.Empty(t, cmp.Diff([]*janitorv1.Verdict{kept, retained, leftover, slot}, got.GetVerdicts(), protocmp.Transform()))
}

// TestOnlyUsersMayCall: components have no business with the janitor.
func TestOnlyUsersMayCall(t *testing.T) {
	as := serveAs(t, newCore(), nil)
	for _, role := range []rpc.Role{rpc.RoleAgent, rpc.RoleAllocator, rpc.RoleController, rpc.RoleGateway, rpc.RoleJanitor, rpc.RoleGC} {
		_, err := as(func(ca *pki.Authority) rpc.TLS { return ca.TLS(t, role) }).ListVerdicts(t.Context(), &janitorv1.ListVerdictsRequest{})
		require.Equal(t, fault.PermissionDenied, fault.ReasonOf(rpc.FromStatus(err)), role)
	}
	_, err := as(func(ca *pki.Authority) rpc.TLS { return ca.User(t, "alice") }).ListVerdicts(t.Context(), &janitorv1.ListVerdictsRequest{})
	require.NoError(t, err)
}

func TestRequestsAreValidated(t *testing.T) {
	client := serve(t, newCore(), nil)
	sweep := func(req *janitorv1.SweepRequest) error {
		stream, err := client.Sweep(t.Context(), req)
		require.NoError(t, err)
		_, err = stream.Recv()
		return err
	}
	_, unspecified := client.ListVerdicts(t.Context(), &janitorv1.ListVerdictsRequest{Actions: []janitorv1.Action{0}})
	_, unheardOf := client.ListVerdicts(t.Context(), &janitorv1.ListVerdictsRequest{Reasons: []janitorv1.Reason{99}})
	for field, err := range map[string]error{
		"actions[0]":       unspecified,
		"reasons[0]":       unheardOf,
		"container_ids[0]": sweep(&janitorv1.SweepRequest{ContainerIds: []string{"../../etc"}}),
		"container_ids":    sweep(&janitorv1.SweepRequest{ContainerIds: []string{"a", "a"}}),
	} {
		var f *fault.Error
		require.ErrorAs(t, rpc.FromStatus(err), &f)
		require.Equal(t, fault.InvalidField, f.Reason())
		require.Equal(t, field, f.Metadata()[fault.FieldKey])
	}
}

func TestUnavailableBeforeTheFirstScan(t *testing.T) {
	c := newCore()
	c.set(fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "the node's containers were not listed yet"))
	client := serve(t, c, nil)
	_, err := client.ListVerdicts(t.Context(), &janitorv1.ListVerdictsRequest{})
	require.True(t, errdefs.IsUnavailable(rpc.FromStatus(err)))
	require.Equal(t, fault.RuntimeUnavailable, fault.ReasonOf(rpc.FromStatus(err)))
	watch, err := client.WatchVerdicts(t.Context(), &janitorv1.WatchVerdictsRequest{})
	require.NoError(t, err)
	_, err = watch.Recv()
	require.Equal(t, fault.RuntimeUnavailable, fault.ReasonOf(rpc.FromStatus(err)))
	sweep, err := client.Sweep(t.Context(), &janitorv1.SweepRequest{ContainerIds: []string{"a"}})
	require.NoError(t, err)
	_, err = sweep.Recv()
	require.Equal(t, fault.RuntimeUnavailable, fault.ReasonOf(rpc.FromStatus(err)), "not an empty result")
}

func TestSweep(t *testing.T) {
	c := newCore()
	gone, busy, kept := judged(orphan("gone")), judged(orphan("busy")), judged(claimed("kept"))
	rest := left(&verdict.Remnant{ContainerID: "rest", Kind: verdict.Snapshot, Since: time.Hour})
	c.results = []janitorrpc.Result{
		{Finding: gone, Outcome: janitorrpc.Deleted, FreedBytes: 4096}, {Finding: busy, Outcome: janitorrpc.Failed, Err: errors.New("device busy")},
		{Finding: kept, Outcome: janitorrpc.Kept}, {Finding: rest, Outcome: janitorrpc.WouldDelete},
	}
	client := serve(t, c, nil)
	sweep := func(req *janitorv1.SweepRequest) []string {
		stream, err := client.Sweep(t.Context(), req)
		require.NoError(t, err)
		var out []string
		for {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return out
			}
			require.NoError(t, err)
			require.Equal(t, "node-1", m.GetVerdict().GetNodeName())
			line := m.GetVerdict().GetContainerId() + " " + strings.TrimPrefix(m.GetOutcome().String(), "OUTCOME_")
			if m.GetMessage() != "" {
				line += " " + m.GetMessage()
			}
			out = append(out, line)
			require.Equal(t, m.GetOutcome() == janitorv1.SweepResponse_OUTCOME_DELETED, m.GetFreedBytes() == 4096)
		}
	}
	for name, tc := range map[string]struct {
		request *janitorv1.SweepRequest
		want    []string
		order   janitorrpc.Order
	}{
		"everything": {&janitorv1.SweepRequest{}, []string{"gone DELETED", "busy FAILED device busy", "rest WOULD_DELETE"}, janitorrpc.Order{}},
		"named": {
			&janitorv1.SweepRequest{ContainerIds: []string{"unknown", "kept", "gone", "none"}, DryRun: true},
			[]string{"gone DELETED", "kept KEPT", "unknown NOT_FOUND", "none NOT_FOUND"},
			janitorrpc.Order{DryRun: true, IDs: map[string]bool{"unknown": true, "kept": true, "gone": true, "none": true}},
		},
		"for a reason": {
			&janitorv1.SweepRequest{Reasons: []janitorv1.Reason{janitorv1.Reason_REASON_LEFTOVER, janitorv1.Reason_REASON_ASSIGNED}},
			[]string{"rest WOULD_DELETE"},
			janitorrpc.Order{Reasons: map[verdict.Reason]bool{verdict.Leftover: true, verdict.Assigned: true}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c.orders = nil
			require.Equal(t, tc.want, sweep(tc.request))
			require.Empty(t, cmp.Diff([]janitorrpc.Order{tc.order}, c.orders, emptyIsNil))
		})
	}
}

// TestSweepEndsWithItsCaller.
func TestSweepEndsWithItsCaller(t *testing.T) {
	c := newCore()
	for range 100_000 { // more than buffers hold
		c.results = append(c.results, janitorrpc.Result{Finding: judged(orphan("a")), Outcome: janitorrpc.Deleted})
	}
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := serve(t, c, nil).Sweep(ctx, &janitorv1.SweepRequest{})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	cancel()
	c.mu.Lock() // the core unlocks it when the sweep has ended
	defer c.mu.Unlock()
	for err == nil {
		_, err = stream.Recv()
	}
	require.Equal(t, codes.Canceled, status.Code(err))
}

func TestRules(t *testing.T) {
	users.CheckRules(t, janitorrpc.Rules(), nil, janitorv1.File_fastsandbox_janitor_v1_janitor_service_proto.Services().ByName("JanitorService"))
}
