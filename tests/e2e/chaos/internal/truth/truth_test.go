package truth_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/typeurl/v2"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/anypb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	testingclock "k8s.io/utils/clock/testing"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/truth"
)

func sandbox(name, uid string) *v1alpha1.Sandbox {
	s := &v1alpha1.Sandbox{}
	s.Name, s.UID = name, types.UID(uid)
	return s
}

// TestHistory follows four sandboxes: one stays, one is deleted, one is observed while it is being deleted, and one
// disappears while the API server is down.
func TestHistory(t *testing.T) {
	begin := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	clock := testingclock.NewFakeClock(begin)
	o := &truth.Observer{Clock: clock, Prefix: "run-"}
	for _, uid := range []string{"stays", "deleted", "going", "vanished"} {
		o.Note(sandbox("run-"+uid, uid), false)
	}
	o.Note(sandbox("other", "other"), false)

	clock.Step(time.Second)
	o.Note(sandbox("run-deleted", "deleted"), true)
	going := sandbox("run-going", "going")
	going.DeletionTimestamp = &metav1.Time{Time: clock.Now()}
	o.Note(going, false)
	clock.Step(time.Second)
	o.Note(going, true)
	o.Missing(map[string]bool{"stays": true}, clock.Now())

	seen, ended := o.Known()
	require.Equal(t, map[string]bool{"stays": true, "deleted": true, "going": true, "vanished": true}, seen)
	require.Equal(t, map[string]time.Time{
		"deleted": begin.Add(time.Second), "going": begin.Add(time.Second), "vanished": begin.Add(2 * time.Second),
	}, ended)
}

func TestContainer(t *testing.T) {
	record, err := anypb.New(&agentv1.SandboxRecord{RequestId: "req"})
	require.NoError(t, err)
	labels := identity.Identity{Namespace: "default", Name: "a", SandboxUID: "uid", Attempt: 2, AgentUID: "agent", Pool: "p", State: identity.StateClaimed}.Labels()
	c := truth.ContainerOf(containers.Container{ID: "uid-2", Labels: labels, Extensions: map[string]typeurl.Any{ctrd.RecordKey: record}}, true)
	require.Equal(t, "req", c.RequestID)
	require.Equal(t, []any{"a", "uid", int64(2), "agent", true, ""}, []any{c.Name, c.UID, c.Attempt, c.AgentUID, c.Running, c.Broken})

	delete(labels, identity.KeyAttempt)
	require.NotEmpty(t, truth.ContainerOf(containers.Container{ID: "uid-2", Labels: labels}, true).Broken)
}

func TestIsContainerID(t *testing.T) {
	for _, ours := range []string{"13e558df-1e2f-4e63-8a85-8ca5cbed8483-1", "slot.0123456789abcdef0123"} {
		require.True(t, truth.IsContainerID(ours), ours)
	}
	for _, other := range []string{"slot.1", "13e558df-1e2f-4e63-8a85-8ca5cbed8483", "1f9d0b515a08d431d10d02d542c1de50515e49ff31413ea7bddb5e19fa2eeb30", "x-13e558df-1e2f-4e63-8a85-8ca5cbed8483-1", ""} {
		require.False(t, truth.IsContainerID(other), other)
	}
}

func TestAgentOf(t *testing.T) {
	const uid = "13e558df-1e2f-4e63-8a85-8ca5cbed8483"
	for file, content := range map[string]string{
		"owner":       uid,
		"config.json": `{"linux":{"cgroupsPath":"/kubepods/besteffort/pod` + uid + `/fsb-x"}}`,
	} {
		dir := t.TempDir()
		require.Empty(t, truth.AgentOf(dir))
		require.NoError(t, os.WriteFile(filepath.Join(dir, file), []byte(content), 0o600))
		require.Equal(t, uid, truth.AgentOf(dir), file)
	}
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte("{"), 0o600))
	require.Empty(t, truth.AgentOf(dir))
}
