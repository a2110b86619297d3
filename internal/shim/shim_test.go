package shim_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/internal/shim"
)

const grace = time.Minute

// node is the versions of a node, and what uses them besides agents.
type node struct {
	dir       string
	clock     *clocktesting.FakePassiveClock
	used      map[string]bool
	asked     []string // by the last call of Collect
	err       error
	during    func() // called while Collect asks
	collector *shim.Collector
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{dir: t.TempDir(), clock: clocktesting.NewFakePassiveClock(time.Unix(1000, 0)), used: map[string]bool{}}
	n.restart()
	return n
}

// restart is another process of the janitor.
func (n *node) restart() {
	n.collector = shim.NewCollector(shim.Config{Dir: n.dir, Grace: grace, Clock: n.clock, InUse: func(_ context.Context, versions []string) (map[string]bool, error) {
		n.asked = versions
		if n.during != nil {
			n.during()
		}
		return n.used, n.err
	}})
}

// install installs a version and returns its name.
func (n *node) install(t *testing.T, program string) (*shim.Installed, string) {
	t.Helper()
	i, err := shim.Install(n.dir, []byte(program), []byte("member"))
	require.NoError(t, err)
	raw, err := os.ReadFile(i.Path)
	require.NoError(t, err)
	require.Equal(t, program, string(raw))
	info, err := os.Stat(i.Path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o755), info.Mode())
	return i, shim.Version(i.Path)
}

// collect lets time pass and collects.
func (n *node) collect(t *testing.T, after time.Duration) []string {
	t.Helper()
	n.clock.SetTime(n.clock.Now().Add(after))
	n.asked = nil
	removed, err := n.collector.Collect(t.Context())
	require.NoError(t, err)
	return removed
}

func (n *node) versions(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(n.dir)
	require.NoError(t, err)
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestVersion(t *testing.T) {
	for path, want := range map[string]string{
		"/x/slots/shim-0123/containerd-shim-fsb-v1": "shim-0123", "/x/slots/shim-0123/other": "", "/x/slots/shim-0123/containerd-shim-fsb-member-v1": "shim-0123", "/x/0123/containerd-shim-fsb-v1": "",
		"containerd-shim-fsb-v1": "", "io.containerd.runc.v2": "", "": "",
	} {
		require.Equal(t, want, shim.Version(path), path)
	}
}

// TestCollect: a version is removed after nothing has used it for the grace period.
func TestCollect(t *testing.T) {
	n := newNode(t)
	agent, version := n.install(t, "one")
	again, same := n.install(t, "one")
	require.Equal(t, version, same)
	agent.Close()
	require.Empty(t, n.collect(t, 0))
	require.Empty(t, n.collect(t, 2*grace), "another agent uses it")
	require.Empty(t, n.asked)
	again.Close()
	n.used[version] = true
	require.Empty(t, n.collect(t, 0))
	require.Empty(t, n.collect(t, 2*grace), "a container uses it")
	require.Equal(t, []string{version}, n.asked)
	clear(n.used)
	require.Empty(t, n.collect(t, 0), "unused from now on")
	require.Empty(t, n.collect(t, grace-1))
	n.used[version] = true
	require.Empty(t, n.collect(t, 1))
	clear(n.used)
	require.Empty(t, n.collect(t, 0), "the period begins again")
	require.Empty(t, n.collect(t, grace-1))
	require.Equal(t, []string{version}, n.collect(t, 1))
	require.Empty(t, n.versions(t))
	require.Empty(t, n.collect(t, grace))
	n.install(t, "one")
}

// TestCollectWaitsAfterAnAgent: an agent that used the version between two collections may have asked containerd for something.
func TestCollectWaitsAfterAnAgent(t *testing.T) {
	n := newNode(t)
	agent, version := n.install(t, "one")
	agent.Close()
	require.Empty(t, n.collect(t, 0))
	agent, _ = n.install(t, "one")
	agent.Close()
	require.Empty(t, n.collect(t, grace))
	require.Equal(t, []string{version}, n.collect(t, grace))
}

// TestCollectKeeps: what cannot be judged stays.
func TestCollectKeeps(t *testing.T) {
	n := newNode(t)
	agent, version := n.install(t, "one")
	agent.Close()
	require.NoError(t, os.MkdirAll(filepath.Join(n.dir, "shim-earlier"), 0o755))     // of an agent without locks
	require.NoError(t, os.MkdirAll(filepath.Join(n.dir, "0123456789abcdef"), 0o755)) // the root of slots
	require.NoError(t, os.MkdirAll(filepath.Join(n.dir, ".old-1/shim-2"), 0o755))
	require.Empty(t, n.collect(t, 0))
	n.err = errors.New("containerd does not answer")
	n.clock.SetTime(n.clock.Now().Add(grace))
	_, err := n.collector.Collect(t.Context())
	require.ErrorIs(t, err, n.err)
	require.Contains(t, n.versions(t), version)
	n.err = nil
	n.restart()
	require.Empty(t, n.collect(t, grace), "another janitor has not seen it unused")
	require.Equal(t, []string{version}, n.collect(t, grace))
	require.Equal(t, []string{"0123456789abcdef", "shim-earlier"}, n.versions(t), "an interrupted removal is completed")
}

// TestInstallWhileCollecting: an agent that starts while its version is about to be removed has to try again, and then has it.
func TestInstallWhileCollecting(t *testing.T) {
	n := newNode(t)
	agent, version := n.install(t, "one")
	agent.Close()
	require.Empty(t, n.collect(t, 0))
	tried := 0
	n.during = func() {
		tried++
		_, err := shim.Install(n.dir, []byte("one"), []byte("member"))
		require.True(t, errdefs.IsUnavailable(err), "%v", err)
		other, err := shim.Install(n.dir, []byte("another"), nil) // which is not judged now
		require.NoError(t, err)
		other.Close()
	}
	require.Equal(t, []string{version}, n.collect(t, grace))
	require.Equal(t, 1, tried)
	agent, _ = n.install(t, "one")
	defer agent.Close()
	n.during = nil
	require.Empty(t, n.collect(t, 2*grace))
	_, err := os.Stat(agent.Path)
	require.NoError(t, err)
}

// TestInstalledStays: agents start and end while a janitor removes what it can, without any grace period. Whatever an agent has installed stays until
// the agent ends.
func TestInstalledStays(t *testing.T) {
	n := newNode(t)
	collector := shim.NewCollector(shim.Config{Dir: n.dir, Clock: n.clock, InUse: func(context.Context, []string) (map[string]bool, error) { return nil, nil }})
	stop := make(chan struct{})
	var removals int
	var collecting, agents sync.WaitGroup
	collecting.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			removed, err := collector.Collect(context.Background())
			if err != nil {
				t.Error(err)
			}
			removals += len(removed)
		}
	})
	for a := range 4 {
		agents.Go(func() {
			for range 200 {
				program := fmt.Sprint("program ", a%2)
				i, err := shim.Install(n.dir, []byte(program), []byte("member"))
				if errdefs.IsUnavailable(err) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				for range 3 {
					if raw, err := os.ReadFile(i.Path); err != nil || string(raw) != program {
						t.Errorf("%q is installed, and has %q: %v", program, raw, err)
					}
				}
				i.Close()
			}
		})
	}
	agents.Wait()
	close(stop)
	collecting.Wait()
	require.Positive(t, removals, "nothing was ever removed")
}
