// Package agentconformance is the contract of AgentService (agent_service.proto) as tests. Every implementation passes them:
// the agent itself and internal/testkit/fakeagent, so that a test against the fake holds for the agent.
package agentconformance

import (
	"context"
	"errors"
	"io"
	"strconv"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Agent is a served AgentService without sandboxes. Its constructor stops it at the end of the test.
type Agent struct {
	Client agentv1.AgentServiceClient
	// UID of the agent's Pod. Its namespace must be default, its pool p, and its capacity 2.
	UID string
	// Image can be started. Remote is another one, which is not on the node and can be pulled.
	Image, Remote string
	// End ends the process of a sandbox by itself.
	End func(sandboxUID string)
}

// Run runs the contract, each test on an agent of its own.
func Run(t *testing.T, serve func(t *testing.T) *Agent) {
	t.Helper()
	for name, test := range map[string]func(*testing.T, *Agent){
		"create reports stages":                        createReportsStages,
		"create is idempotent":                         createIsIdempotent,
		"calls for another agent are refused":          callsForAnotherAgentAreRefused,
		"records of others are refused":                recordsOfOthersAreRefused,
		"an older attempt is refused":                  olderAttemptIsRefused,
		"delete is idempotent":                         deleteIsIdempotent,
		"a create after its delete is refused":         createAfterDeleteIsRefused,
		"tombstones are kept until they are forgotten": tombstonesAreKept,
		"lower terms are refused":                      lowerTermsAreRefused,
		"a draining agent creates nothing":             drainRefusesCreates,
		"the status stream is numbered":                statusStreamIsNumbered,
		"an ended sandbox frees capacity and ports":    endedSandboxFreesCapacity,
		"persisted sandboxes are reported so":          persistedIsReported,
		"pinned images are reported":                   pinnedImagesAreReported,
		"a pull ends with done":                        pullEndsWithDone,
	} {
		t.Run(name, func(t *testing.T) { test(t, serve(t)) })
	}
}

func (a *Agent) fence(uid string, attempt int64) *agentv1.Fence {
	return &agentv1.Fence{SandboxUid: uid, Attempt: attempt, AgentUid: a.UID}
}

// record is that of a strong create: an agent may delay reports of fast ones.
func (a *Agent) record(uid string, attempt int64, ports ...int32) *agentv1.SandboxRecord {
	return &agentv1.SandboxRecord{
		Fence: a.fence(uid, attempt), Namespace: "default", Name: "name-" + uid, ConsistencyMode: sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG,
		Spec: &sandboxv1.SandboxSpec{Image: a.Image, Pool: "p", Command: []string{"sleep"}, Ports: ports, Network: sandboxv1.NetworkMode_NETWORK_MODE_AGENT},
	}
}

func receive[T any](stream grpc.ServerStreamingClient[T], err error) ([]*T, error) {
	if err != nil {
		return nil, rpc.FromStatus(err)
	}
	var all []*T
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return all, rpc.FromStatus(err)
		}
		all = append(all, m)
	}
}

func (a *Agent) create(ctx context.Context, r *agentv1.SandboxRecord) ([]*agentv1.CreateSandboxResponse, error) {
	return receive(a.Client.CreateSandbox(ctx, &agentv1.CreateSandboxRequest{Record: r}))
}

func (a *Agent) mustCreate(t *testing.T, r *agentv1.SandboxRecord) *agentv1.SandboxReport {
	t.Helper()
	stages, err := a.create(t.Context(), r)
	require.NoError(t, err)
	return stages[len(stages)-1].GetReport()
}

func (a *Agent) delete(t *testing.T, f *agentv1.Fence) {
	t.Helper()
	stages, err := receive(a.Client.DeleteSandbox(t.Context(), &agentv1.DeleteSandboxRequest{Fence: f}))
	require.NoError(t, err)
	require.Equal(t, agentv1.DeleteStage_DELETE_STAGE_REMOVED, stages[len(stages)-1].GetStage())
}

// snapshot returns what a new status stream begins with.
func (a *Agent) snapshot(t *testing.T) *agentv1.AgentSnapshot {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := a.Client.WatchStatus(ctx, &agentv1.WatchStatusRequest{})
	require.NoError(t, err)
	m, err := stream.Recv()
	require.NoError(t, err)
	require.NotNil(t, m.GetSnapshot())
	return m.GetSnapshot()
}

func requireReason(t *testing.T, want fault.Reason, err error) {
	t.Helper()
	require.Error(t, err)
	require.Equal(t, want, fault.ReasonOf(err), "%v", err)
}

func createReportsStages(t *testing.T, a *Agent) {
	stages, err := a.create(t.Context(), a.record("u", 1, 8080))
	require.NoError(t, err)
	require.Equal(t, agentv1.CreateStage_CREATE_STAGE_ADMITTED, stages[0].GetStage())
	last := stages[len(stages)-1]
	require.Equal(t, agentv1.CreateStage_CREATE_STAGE_STARTED, last.GetStage())
	for _, m := range stages[:len(stages)-1] {
		require.NotEqual(t, agentv1.CreateStage_CREATE_STAGE_STARTED, m.GetStage())
		require.Nil(t, m.GetReport())
	}
	report := last.GetReport()
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, report.GetState())
	require.Len(t, report.GetEndpoints(), 1)
	require.NotEmpty(t, report.GetContainerId())
	require.NotNil(t, report.GetStartTime())
	require.False(t, report.GetPersisted())
}

func createIsIdempotent(t *testing.T, a *Agent) {
	record := a.record("u", 1)
	first := a.mustCreate(t, record)
	record.Traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	again := a.mustCreate(t, record)
	require.Equal(t, first.GetContainerId(), again.GetContainerId())
	require.Equal(t, first.GetStartTime().AsTime(), again.GetStartTime().AsTime())
	require.Len(t, a.snapshot(t).GetSandboxes(), 1)
	other := a.record("u", 1)
	other.Spec.Command = []string{"other"}
	_, err := a.create(t.Context(), other)
	require.True(t, errdefs.IsAlreadyExists(err), "%v", err)
	requireReason(t, fault.SandboxExists, err)
}

func callsForAnotherAgentAreRefused(t *testing.T, a *Agent) {
	record := a.record("u", 1)
	record.Fence.AgentUid = "another"
	ctx := t.Context()
	for name, call := range map[string]func() error{
		"create": func() error { _, err := a.create(ctx, record); return err },
		"delete": func() error {
			_, err := receive(a.Client.DeleteSandbox(ctx, &agentv1.DeleteSandboxRequest{Fence: record.GetFence()}))
			return err
		},
		"mark persisted": func() error {
			_, err := a.Client.MarkPersisted(ctx, &agentv1.MarkPersistedRequest{Fence: record.GetFence()})
			return err
		},
		"forget tombstone": func() error {
			_, err := a.Client.ForgetTombstone(ctx, &agentv1.ForgetTombstoneRequest{Fence: record.GetFence()})
			return err
		},
		"drain": func() error { _, err := a.Client.Drain(ctx, &agentv1.DrainRequest{AgentUid: "another"}); return err },
		"pin": func() error {
			_, err := a.Client.SetPinnedImages(ctx, &agentv1.SetPinnedImagesRequest{AgentUid: "another"})
			return err
		},
	} {
		err := rpc.FromStatus(call())
		require.True(t, errdefs.IsFailedPrecondition(err), "%s: %v", name, err)
		require.Equal(t, fault.FenceMismatch, fault.ReasonOf(err), name)
	}
	require.True(t, a.snapshot(t).GetAccepting(), "the drain was for another agent")
}

func olderAttemptIsRefused(t *testing.T, a *Agent) {
	a.mustCreate(t, a.record("u", 2))
	_, err := a.create(t.Context(), a.record("u", 1))
	requireReason(t, fault.FenceMismatch, err)
	a.delete(t, a.fence("u", 2))
	_, err = a.create(t.Context(), a.record("u", 1))
	requireReason(t, fault.FenceMismatch, err)
	a.mustCreate(t, a.record("u", 3))
}

func deleteIsIdempotent(t *testing.T, a *Agent) {
	a.mustCreate(t, a.record("u", 1))
	for range 2 {
		a.delete(t, a.fence("u", 1))
		require.Empty(t, a.snapshot(t).GetSandboxes())
	}
}

func createAfterDeleteIsRefused(t *testing.T, a *Agent) {
	a.delete(t, a.fence("u", 1))
	_, err := a.create(t.Context(), a.record("u", 1))
	require.True(t, errdefs.IsAborted(err), "%v", err)
	requireReason(t, fault.SandboxTerminating, err)
	a.mustCreate(t, a.record("u", 2))
}

func tombstonesAreKept(t *testing.T, a *Agent) {
	a.mustCreate(t, a.record("u", 1))
	tombstone := &agentv1.Tombstone{Fence: a.fence("u", 1), Namespace: "default", Name: "name-u"}
	_, err := receive(a.Client.DeleteSandbox(t.Context(), &agentv1.DeleteSandboxRequest{
		Fence: a.fence("u", 1), Tombstone: &agentv1.Tombstone{Fence: a.fence("v", 1), Namespace: "default", Name: "name-v"},
	}))
	require.True(t, errdefs.IsInvalidArgument(err), "the tombstone of another container: %v", err)
	_, err = receive(a.Client.DeleteSandbox(t.Context(), &agentv1.DeleteSandboxRequest{Fence: a.fence("u", 1), Tombstone: tombstone}))
	require.NoError(t, err)
	kept := a.snapshot(t).GetTombstones()
	require.Len(t, kept, 1)
	require.Equal(t, "u", kept[0].GetFence().GetSandboxUid())
	for range 2 {
		_, err = a.Client.ForgetTombstone(t.Context(), &agentv1.ForgetTombstoneRequest{Fence: a.fence("u", 1)})
		require.NoError(t, err)
		require.Empty(t, a.snapshot(t).GetTombstones())
	}
}

func lowerTermsAreRefused(t *testing.T, a *Agent) {
	term := func(n int64) context.Context {
		return metadata.AppendToOutgoingContext(t.Context(), rpc.TermKey, strconv.FormatInt(n, 10))
	}
	_, err := a.Client.AnnounceLeader(term(7), &agentv1.AnnounceLeaderRequest{})
	require.NoError(t, err)
	for _, ctx := range []context.Context{term(6), t.Context()} {
		_, err = a.create(ctx, a.record("u", 1))
		require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
		requireReason(t, fault.LeaderSuperseded, err)
		var f *fault.Error
		require.ErrorAs(t, err, &f)
		require.Equal(t, "7", f.Metadata()[rpc.TermMetadata])
	}
	require.Empty(t, a.snapshot(t).GetSandboxes(), "WatchStatus needs no term")
	_, err = a.create(term(8), a.record("u", 1))
	require.NoError(t, err)
	_, err = a.Client.AnnounceLeader(term(7), &agentv1.AnnounceLeaderRequest{})
	requireReason(t, fault.LeaderSuperseded, rpc.FromStatus(err))
}

func drainRefusesCreates(t *testing.T, a *Agent) {
	a.mustCreate(t, a.record("u", 1))
	for range 2 {
		resp, err := a.Client.Drain(t.Context(), &agentv1.DrainRequest{AgentUid: a.UID})
		require.NoError(t, err)
		require.EqualValues(t, 1, resp.GetSandboxes())
	}
	snapshot := a.snapshot(t)
	require.False(t, snapshot.GetAccepting())
	require.Equal(t, "Draining", snapshot.GetNotAcceptingReason())
	_, err := a.create(t.Context(), a.record("v", 1))
	requireReason(t, fault.AgentDraining, err)
	a.mustCreate(t, a.record("u", 1)) // it exists already
	_, err = a.Client.Drain(t.Context(), &agentv1.DrainRequest{AgentUid: a.UID, Resume: true})
	require.NoError(t, err)
	a.mustCreate(t, a.record("v", 1))
}

func statusStreamIsNumbered(t *testing.T, a *Agent) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := a.Client.WatchStatus(ctx, &agentv1.WatchStatusRequest{})
	require.NoError(t, err)
	first, err := stream.Recv()
	require.NoError(t, err)
	require.EqualValues(t, 1, first.GetSequence())
	require.Equal(t, a.UID, first.GetSnapshot().GetInfo().GetPodUid())
	require.NotEmpty(t, first.GetEpoch())
	a.mustCreate(t, a.record("u", 1))
	a.delete(t, a.fence("u", 1))
	states := map[agentv1.SandboxState]bool{}
	for sequence := int64(2); !states[agentv1.SandboxState_SANDBOX_STATE_TERMINATED]; sequence++ {
		m, err := stream.Recv()
		require.NoError(t, err)
		require.Equal(t, sequence, m.GetSequence())
		require.Equal(t, first.GetEpoch(), m.GetEpoch())
		require.Nil(t, m.GetSnapshot())
		for _, r := range m.GetDelta().GetSandboxes() {
			require.Equal(t, "u", r.GetRecord().GetFence().GetSandboxUid())
			states[r.GetState()] = true
		}
	}
	require.True(t, states[agentv1.SandboxState_SANDBOX_STATE_RUNNING])
}

func endedSandboxFreesCapacity(t *testing.T, a *Agent) {
	a.mustCreate(t, a.record("u", 1, 8080))
	a.mustCreate(t, a.record("v", 1))
	_, err := a.create(t.Context(), a.record("w", 1))
	require.True(t, errdefs.IsResourceExhausted(err), "%v", err)
	requireReason(t, fault.NoCapacity, err)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := a.Client.WatchStatus(ctx, &agentv1.WatchStatusRequest{})
	require.NoError(t, err)
	a.End("u")
	for ended := false; !ended; {
		m, err := stream.Recv()
		require.NoError(t, err)
		reports := append(m.GetSnapshot().GetSandboxes(), m.GetDelta().GetSandboxes()...)
		for _, r := range reports {
			ended = ended || r.GetState() == agentv1.SandboxState_SANDBOX_STATE_STOPPED && r.GetFinishTime() != nil && r.ExitCode != nil
		}
	}
	a.mustCreate(t, a.record("w", 1, 8080))
	require.Len(t, a.snapshot(t).GetSandboxes(), 3, "the record of the ended sandbox is kept")
}

func persistedIsReported(t *testing.T, a *Agent) {
	_, err := a.Client.MarkPersisted(t.Context(), &agentv1.MarkPersistedRequest{Fence: a.fence("u", 1)})
	require.True(t, errdefs.IsNotFound(rpc.FromStatus(err)), "%v", err)
	a.mustCreate(t, a.record("u", 1))
	for range 2 {
		_, err = a.Client.MarkPersisted(t.Context(), &agentv1.MarkPersistedRequest{Fence: a.fence("u", 1)})
		require.NoError(t, err)
		require.True(t, a.snapshot(t).GetSandboxes()[0].GetPersisted())
	}
	_, err = receive(a.Client.CreateSandbox(t.Context(), &agentv1.CreateSandboxRequest{Record: a.record("v", 1), Persisted: true}))
	require.NoError(t, err)
	for _, r := range a.snapshot(t).GetSandboxes() {
		require.True(t, r.GetPersisted(), r.GetContainerId())
	}
}

func pinnedImagesAreReported(t *testing.T, a *Agent) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := a.Client.WatchStatus(ctx, &agentv1.WatchStatusRequest{})
	require.NoError(t, err)
	_, err = stream.Recv() // the snapshot: what follows is sent as deltas
	require.NoError(t, err)
	_, err = a.Client.SetPinnedImages(t.Context(), &agentv1.SetPinnedImagesRequest{AgentUid: a.UID, Images: []string{a.Remote, a.Image}})
	require.NoError(t, err)
	for ready := false; !ready; {
		m, err := stream.Recv()
		require.NoError(t, err)
		pinned := m.GetDelta().GetPinnedImages().GetImages()
		if m.GetDelta().GetPinnedImages() == nil {
			continue
		}
		require.Len(t, pinned, 2)
		require.Equal(t, []string{a.Remote, a.Image}, []string{pinned[0].GetImage(), pinned[1].GetImage()})
		ready = true
		for _, p := range pinned {
			ready = ready && p.GetState() == agentv1.PinnedImageState_PINNED_IMAGE_STATE_READY
		}
	}
	require.Len(t, a.snapshot(t).GetPinnedImages(), 2)
	for range 2 {
		_, err = a.Client.SetPinnedImages(t.Context(), &agentv1.SetPinnedImagesRequest{AgentUid: a.UID})
		require.NoError(t, err)
		require.Empty(t, a.snapshot(t).GetPinnedImages())
	}
}

func pullEndsWithDone(t *testing.T, a *Agent) {
	for range 2 {
		progress, err := receive(a.Client.PullImage(t.Context(), &agentv1.PullImageRequest{Image: a.Remote}))
		require.NoError(t, err)
		last := progress[len(progress)-1]
		require.Equal(t, "done", last.GetProgress().GetPhase())
		require.NotEmpty(t, last.GetImage())
		require.Equal(t, last.GetProgress().GetTotalBytes(), last.GetProgress().GetDownloadedBytes())
		for _, m := range progress[:len(progress)-1] {
			require.NotEqual(t, "done", m.GetProgress().GetPhase())
		}
	}
	_, err := receive(a.Client.PullImage(t.Context(), &agentv1.PullImageRequest{Image: "No Reference"}))
	require.True(t, errdefs.IsInvalidArgument(err), "%v", err)
}
