package ctrd_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// fakeShim begins the name under which this test's binary runs as a shim.
const fakeShim = "containerd-shim-test"

// runFakeShim runs until its standard input ends. With the argument "child" it has a child meanwhile.
func runFakeShim() {
	if os.Args[len(os.Args)-1] == "child" {
		child := exec.Command("sleep", "1000")
		if child.Start() != nil {
			os.Exit(2)
		}
		defer func() { _ = child.Wait() }()
		defer func() { _ = child.Process.Kill() }()
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// shim is a running fake shim.
type shim struct {
	cmd   *exec.Cmd
	stdin io.Closer
	ended chan struct{}
}

// shimBinary returns a program that is this test's binary under another name.
func shimBinary(t *testing.T, name string) string {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	raw, err := os.ReadFile(self)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), name)
	// A process that another test forks meanwhile would hold the file open for writing for a moment: it could not be executed.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	require.NoError(t, os.WriteFile(path, raw, 0o700))
	return path
}

func startShim(t *testing.T, id string, args ...string) *shim {
	t.Helper()
	return startAs(t, exec.Cmd{Path: shimBinary(t, fakeShim)}, id, args...)
}

// startAs starts a process with the command line of a shim.
func startAs(t *testing.T, cmd exec.Cmd, id string, args ...string) *shim {
	t.Helper()
	cmd.Args = append([]string{fakeShim, "-namespace", "k8s.io", "-id", id}, args...)
	s := &shim{cmd: &cmd, ended: make(chan struct{})}
	var err error
	s.stdin, err = s.cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := s.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, s.cmd.Start())
	_, err = bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	go func() { defer close(s.ended); _ = s.cmd.Wait() }()
	t.Cleanup(s.end)
	return s
}

// end ends the shim, and waits until it has ended.
func (s *shim) end() {
	_ = s.stdin.Close()
	<-s.ended
}

// killed reports whether the shim was killed; it may be running or have ended by itself otherwise.
func (s *shim) killed() bool {
	select {
	case <-s.ended:
		status, ok := s.cmd.ProcessState.Sys().(syscall.WaitStatus)
		return ok && status.Signal() == syscall.SIGKILL
	default:
		return false
	}
}

// slots returns the ids of n slots that no other test, and no other test process, uses.
func slots(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = identity.SlotID(strings.ReplaceAll(uuid.NewString(), "-", "")[:20])
	}
	return out
}

// hurry returns a clock on which time passes whenever it is waited for, once begin is closed; at once if begin is nil.
func hurry(t *testing.T, begin <-chan struct{}) *clocktesting.FakeClock {
	t.Helper()
	clock, stop := clocktesting.NewFakeClock(time.Now()), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		if begin != nil {
			select {
			case <-begin:
			case <-stop:
				return
			}
		}
		ticker := time.NewTicker(time.Millisecond)
		defer ticker.Stop()
		for {
			select {
			case <-stop:
				return
			case <-ticker.C:
				if clock.HasWaiters() {
					clock.Step(10 * time.Millisecond)
				}
			}
		}
	})
	t.Cleanup(func() { close(stop); wg.Wait() })
	return clock
}

// TestRemoveEndsTheShimOfItsGroup: the shim that still runs is that of a group, or of the removed slot itself, which had joined the
// group after its first shim.
func TestRemoveEndsTheShimOfItsGroup(t *testing.T) {
	t.Parallel()
	id := slots(3)
	first, second, third := id[0], id[1], id[2]
	for name, test := range map[string]struct {
		groups map[string]string
		shim   []string
		joins  string
		want   bool
	}{
		"last of its group":          {groups: map[string]string{second: first}, shim: []string{first}, want: true},
		"last, and started its shim": {groups: map[string]string{second: first}, shim: []string{second}, want: true},
		"others have another group":  {groups: map[string]string{second: first, third: third}, shim: []string{first}, want: true},
		"a slot joins the group":     {groups: map[string]string{second: first}, shim: []string{first}, joins: first},
		"a slot joins another group": {groups: map[string]string{second: first}, shim: []string{first}, joins: third, want: true},
		"another has a record":       {groups: map[string]string{second: first, third: first}, shim: []string{first}},
		"shim of another group":      {groups: map[string]string{second: first}, shim: []string{third}},
		"shim with a child":          {groups: map[string]string{second: first}, shim: []string{first, "child"}},
		"binary that cleans up":      {groups: map[string]string{second: first}, shim: []string{first, "delete"}},
		"first of its group":         {groups: map[string]string{second: second}, shim: []string{second}, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := startShim(t, test.shim[0], test.shim[1:]...)
			defer s.end()
			h := &host{status: task.Status_RUNNING, groups: test.groups}
			r := h.remover(t)
			r.ProcRoot, r.Clock = "/proc", hurry(t, nil)
			if test.joins != "" {
				r.JoinsGroup = func(group string) bool { return group == test.joins }
			}
			require.NoError(t, r.Remove(t.Context(), second))
			if test.want {
				<-s.ended
			}
			require.Equal(t, test.want, s.killed())
			require.NotContains(t, h.groups, second)
		})
	}
}

func TestShimThatEndsByItselfIsNotKilled(t *testing.T) {
	t.Parallel()
	id := slots(1)[0]
	s := startShim(t, id)
	h := &host{status: task.Status_RUNNING, groups: map[string]string{id: id}}
	r := h.remover(t)
	r.ProcRoot, r.Clock = "/proc", hurry(t, s.ended)
	r.Before = func(step ctrd.Step) {
		if step == ctrd.StepShim {
			require.NoError(t, s.stdin.Close()) // its end takes a moment, in which no time passes
		}
	}
	require.NoError(t, r.Remove(t.Context(), id))
	<-s.ended
	require.False(t, s.killed())
}

// TestConcurrentRemovalsEndTheShim removes the last two slots of a group: neither sees the other's record as that of a slot that
// stays, at whatever step it is.
func TestConcurrentRemovalsEndTheShim(t *testing.T) {
	for _, at := range ctrd.Steps() {
		t.Run(string(at), func(t *testing.T) {
			t.Parallel()
			id := slots(2)
			s := startShim(t, id[0])
			h := &host{status: task.Status_RUNNING, groups: map[string]string{id[0]: id[0], id[1]: id[0]}}
			r := h.remover(t)
			r.ProcRoot, r.Clock = "/proc", hurry(t, nil)
			begun := false
			r.Before = func(step ctrd.Step) {
				if step == at && !begun {
					begun = true
					require.NoError(t, r.Remove(t.Context(), id[1]))
				}
			}
			require.NoError(t, r.Remove(t.Context(), id[0]))
			<-s.ended
			require.True(t, s.killed())
			require.Empty(t, h.groups)
		})
	}
}

// TestRecordStaysUntilTheShimHasEnded: it is the evidence from which the next removal, or the janitor, finds the shim.
func TestRecordStaysUntilTheShimHasEnded(t *testing.T) {
	t.Parallel()
	id := slots(1)[0]
	s := startShim(t, id)
	h := &host{status: task.Status_RUNNING, groups: map[string]string{id: id}, fail: map[string][]error{"list containers": {errdefs.ErrUnavailable}}}
	r := h.remover(t)
	r.ProcRoot = "/proc"
	require.ErrorIs(t, r.Remove(t.Context(), id), errdefs.ErrUnavailable)
	require.Contains(t, h.groups, id)
	require.False(t, s.killed())

	died := errors.New("the agent was killed")
	r.Before = func(step ctrd.Step) {
		if step == ctrd.StepShim {
			panic(died)
		}
	}
	require.PanicsWithError(t, died.Error(), func() { _ = r.Remove(t.Context(), id) })
	require.Contains(t, h.groups, id)
	next := h.remover(t)
	next.ProcRoot, next.Clock = "/proc", hurry(t, nil)
	require.NoError(t, next.Remove(t.Context(), id))
	<-s.ended
	require.True(t, s.killed())
}
