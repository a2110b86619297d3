package disk_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/disk"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/tree"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// node has containers with what they use, and how each was ended.
type node struct {
	clock *clocktesting.FakeClock

	mu       sync.Mutex
	used     map[string]runtime.DiskUsage
	takes    map[string]time.Duration // the measurement of a container; none for most
	measured map[string]int
	failed   error // of the next End
	ended    map[string]string
}

func newNode(used map[string]runtime.DiskUsage) *node {
	return &node{clock: clocktesting.NewFakeClock(time.Unix(1000, 0)), used: used, takes: map[string]time.Duration{}, measured: map[string]int{}, ended: map[string]string{}}
}

func (n *node) Running() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Sorted(maps.Keys(n.used))
}

func (n *node) DiskUsage(_ context.Context, id string, _ runtime.DiskUsage) (runtime.DiskUsage, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.clock.Step(n.takes[id])
	n.measured[id]++
	switch id {
	case "removed":
		return runtime.DiskUsage{}, errdefs.ErrNotFound
	case "broken":
		return runtime.DiskUsage{}, errors.New("input/output error")
	case "deep":
		return runtime.DiskUsage{Bytes: 1}, fmt.Errorf("measuring: %w", tree.ErrTooDeep)
	}
	return n.used[id], nil
}

func (n *node) End(_ context.Context, id, reason, message string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.failed; err != nil {
		n.failed = nil
		return err
	}
	n.ended[id] = reason + ": " + message
	delete(n.used, id)
	return nil
}

// counts returns how often each container was measured.
func (n *node) counts() map[string]int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return maps.Clone(n.measured)
}

// pass lets time pass, second by second, and each time waits until the watcher waits again.
func (n *node) pass(t *testing.T, d time.Duration) {
	t.Helper()
	for end := n.clock.Now().Add(d); n.clock.Now().Before(end); {
		require.Eventually(t, n.clock.HasWaiters, testkit.Timeout, time.Millisecond)
		n.clock.Step(time.Second)
	}
	require.Eventually(t, n.clock.HasWaiters, testkit.Timeout, time.Millisecond)
}

func watch(t *testing.T, n *node, limit runtime.DiskUsage) *disk.Watcher {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	w := disk.New(disk.Config{Runtime: n, Sandboxes: n, Limit: limit, Clock: n.clock})
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	return w
}

// TestMeasured: the last measurement of a container is known until it has ended, and none of one that could not be measured.
func TestMeasured(t *testing.T) {
	n := newNode(map[string]runtime.DiskUsage{"a": {Bytes: 50, Inodes: 3}, "big": {Bytes: 101}, "broken": {}})
	w := watch(t, n, runtime.DiskUsage{Bytes: 100})
	_, ok := w.Measured("a")
	require.False(t, ok, "it is not due yet")
	n.pass(t, 12*time.Second)
	got, ok := w.Measured("a")
	require.True(t, ok)
	require.Equal(t, runtime.DiskUsage{Bytes: 50, Inodes: 3}, got.DiskUsage)
	require.WithinRange(t, got.At, time.Unix(1010, 0), time.Unix(1012, 0))
	for _, id := range []string{"big", "broken"} {
		_, ok := w.Measured(id)
		require.False(t, ok, id)
	}
}

// TestSandboxesOverTheLimitAreEnded: without a limit, one sandbox filled the disk of its node. One that cannot be measured is over it.
func TestSandboxesOverTheLimitAreEnded(t *testing.T) {
	n := newNode(map[string]runtime.DiskUsage{
		"at the limit": {Bytes: 100, Inodes: 10}, "bytes": {Bytes: 101}, "inodes": {Inodes: 11}, "deep": {}, "removed": {}, "broken": {},
	})
	n.failed = errors.New("containerd is away")
	watch(t, n, runtime.DiskUsage{Bytes: 100, Inodes: 10})
	n.pass(t, 22*time.Second)
	require.Equal(t, map[string]string{
		"bytes":  "DiskLimitExceeded: the sandbox's files take 101 bytes of disk, more than the 100 allowed",
		"inodes": "DiskLimitExceeded: the sandbox has 11 files, more than the 10 allowed",
		"deep":   "DiskLimitExceeded: the sandbox's directories nest deeper than the 512 allowed",
	}, n.ended)
	require.Equal(t, 2, n.counts()["at the limit"])
}

func TestZeroIsNoLimit(t *testing.T) {
	n := newNode(map[string]runtime.DiskUsage{"a": {Bytes: 1 << 60, Inodes: 3}})
	watch(t, n, runtime.DiskUsage{Inodes: 10})
	n.pass(t, 12*time.Second)
	require.Equal(t, map[string]int{"a": 1}, n.counts())
	require.Empty(t, n.ended)

	none := newNode(nil)
	watch(t, none, runtime.DiskUsage{})
	require.Never(t, none.clock.HasWaiters, 20*time.Millisecond, testkit.Tick, "nothing is measured")
}

// TestSlowSandboxDelaysItself: one with very many files, whose measurement takes long, is measured less often, and no other one is. All
// measurements together left the next ones of every sandbox late before, so that one sandbox could hide another.
func TestSlowSandboxDelaysItself(t *testing.T) {
	n := newNode(map[string]runtime.DiskUsage{"slow": {}, "other": {}})
	n.takes["slow"] = 8 * time.Second
	watch(t, n, runtime.DiskUsage{Bytes: 1})
	n.pass(t, 100*time.Second)
	got := n.counts()
	require.Equal(t, 2, got["slow"], "once in 80 s")
	require.GreaterOrEqual(t, got["other"], 6, "in 68 s of the 100")
}
