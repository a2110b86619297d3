//go:build integration

package ctrd_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	apievents "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// TestOwnExecFailures: a process that cannot be executed is an error of Start, with the code that runc's shim gives it, and nothing of it is left.
func TestOwnExecFailures(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t, containerd.WithFile("/garbage", "no program\x00\x01", 0o755), containerd.WithFile("/data", "x", 0o644)))
	runc, fsb := withSlots(t, s), newRuntime(t, s, mapped(t, s))
	ids := map[string]*ctrd.Runtime{}
	var order []string
	for _, r := range []*ctrd.Runtime{runc, fsb} {
		b := box(t, s, false, containerd.Busybox, "sleep", "1000")
		require.NoError(t, launch(t.Context(), r, b))
		ids[b.ID] = r
		order = append(order, b.ID)
	}
	for _, c := range []struct {
		name   string
		args   []string
		change func(*specs.Process)
		says   string
		code   uint32
	}{
		{"no command", []string{"nope"}, nil, "no such file or directory", 127},
		{"no path", []string{"/bin/nope"}, nil, "no such file or directory", 127},
		{"not executable", []string{"/data"}, nil, "permission denied", 126},
		{"a directory", []string{"/bin"}, nil, "permission denied", 126},
		{"not a program", []string{"/garbage"}, nil, "exec format error", 126},
		{"no working directory", []string{"true"}, func(p *specs.Process) { p.Cwd = "/missing" }, "entering the working directory /missing", 127},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := codes.Unknown.String()
			for i, id := range order {
				if i == 0 && c.name == "not a program" {
					continue // runc reports it as the exit of a process that has started
				}
				task, process := processOf(t, s, id, c.args...)
				if c.change != nil {
					c.change(process)
				}
				raw, err := typeurl.MarshalAnyToProto(process)
				require.NoError(t, err)
				service := s.Client.TaskService()
				_, err = service.Exec(t.Context(), &tasks.ExecProcessRequest{ContainerID: id, ExecID: "bad", Spec: raw})
				require.NoError(t, err)
				_, err = service.Start(t.Context(), &tasks.StartRequest{ContainerID: id, ExecID: "bad"})
				require.Error(t, err)
				code := status.Code(err).String()
				if i == 0 {
					want = code
				} else {
					require.Equal(t, want, code, "%v", err)
					require.ErrorContains(t, err, c.says)
					exit, err := service.Wait(t.Context(), &tasks.WaitRequest{ContainerID: id, ExecID: "bad"})
					require.NoError(t, err)
					require.Equal(t, c.code, exit.GetExitStatus())
				}
				_, err = service.DeleteProcess(t.Context(), &tasks.DeleteProcessRequest{ContainerID: id, ExecID: "bad"})
				require.NoError(t, err)
				pids, err := task.Pids(t.Context())
				require.NoError(t, err)
				require.LessOrEqual(t, len(pids), 2, "the container's process, and its supervisor")
			}
		})
	}
	for id, r := range ids {
		require.NoError(t, r.Delete(t.Context(), id))
	}
}

// TestOwnExecRefusals: a container that takes no process now, and specs that the runtime does not have.
func TestOwnExecRefusals(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	id := started(t, s, r, 1)[0]
	task, process := processOf(t, s, id, "true")
	service := s.Client.TaskService()
	add := func(container, exec string, change func(*specs.Process)) error {
		p := *process
		if change != nil {
			change(&p)
		}
		raw, err := typeurl.MarshalAnyToProto(&p)
		require.NoError(t, err)
		_, err = service.Exec(t.Context(), &tasks.ExecProcessRequest{ContainerID: container, ExecID: exec, Spec: raw})
		return errgrpc.ToNative(err)
	}
	require.True(t, errdefs.IsNotFound(add("nowhere", "e", nil)))
	require.NoError(t, add(id, "e", nil))
	require.True(t, errdefs.IsAlreadyExists(add(id, "e", nil)))
	for name, change := range map[string]func(*specs.Process){
		"more capabilities": func(p *specs.Process) { p.Capabilities = &specs.LinuxCapabilities{Bounding: []string{"CAP_SYS_ADMIN"}} },
		"no command":        func(p *specs.Process) { p.Args = nil },
		"a profile":         func(p *specs.Process) { p.ApparmorProfile = "unconfined" },
	} {
		require.True(t, errdefs.IsInvalidArgument(add(id, "other", change)), name)
	}
	// Paused between the two calls, and before both.
	require.NoError(t, task.Pause(t.Context()))
	_, err := service.Start(t.Context(), &tasks.StartRequest{ContainerID: id, ExecID: "e"})
	require.ErrorContains(t, err, "paused")
	require.True(t, errdefs.IsFailedPrecondition(add(id, "other", nil)))
	require.NoError(t, task.Resume(t.Context()))
	// A slot that is not claimed.
	slot := box(t, s, true, containerd.Busybox)
	require.NoError(t, r.StartSlot(t.Context(), runtime.Slot{
		ID: slot.ID, Labels: identity.Identity{AgentUID: "agent", State: identity.StateSlot}.Labels(), Group: slot.ID,
		LogPath: slot.LogPath, HostnamePath: slot.HostnamePath,
	}))
	require.True(t, errdefs.IsFailedPrecondition(add(slot.ID, "e", nil)))
	require.NoError(t, r.Delete(t.Context(), slot.ID))
	// A container that has ended.
	require.NoError(t, r.Signal(t.Context(), id, syscall.SIGKILL, false))
	_, err = r.Wait(t.Context(), id)
	require.NoError(t, err)
	require.True(t, errdefs.IsFailedPrecondition(add(id, "late", nil)))
	require.NoError(t, r.Delete(t.Context(), id))
}

// TestOwnProgramIsReadOnly has a container execute sandbox-init, which it reaches as its own executable, and write to it once it has ended.
func TestOwnProgramIsReadOnly(t *testing.T) {
	s := containerd.Start(t)
	// With this directory, sandbox-init waits.
	s.Import(t, containerd.Busybox, containerd.Image(t, containerd.WithDirectory("/fsb")))
	r := newRuntime(t, s, own(t, s))
	const overwrite = `exec 3</proc/$pid/exe; kill -9 $pid; while [ -e /proc/$pid/exe ]; do sleep 0.05; done; echo x >/proc/self/fd/3`
	b := box(t, s, false, containerd.Busybox, "sleep", "1000")
	require.NoError(t, launch(t.Context(), r, b))
	e, err := addProcess(t, s, b.ID, nil, nil, "/proc/self/exe")
	require.NoError(t, err)
	require.NoError(t, e.Start(t.Context()))
	_, _, stderr := execute(t, s, b.ID, nil, "sh", "-c", `for d in /proc/[0-9]*; do case "$(cat $d/cmdline)" in /proc/self/exe*) pid=${d#/proc/};; esac; done; `+overwrite)
	require.Contains(t, stderr, "Read-only file system")
	code, _, _ := e.result(t)
	require.EqualValues(t, 137, code)
	require.NoError(t, r.Delete(t.Context(), b.ID))

	// The first process of a container: another one keeps its executable, and the container ends with it.
	b = box(t, s, false, containerd.Busybox, "/proc/self/exe")
	require.NoError(t, launch(t.Context(), r, b))
	task, _ := processOf(t, s, b.ID)
	exe, err := os.Open(filepath.Join("/proc", strconv.Itoa(int(task.Pid())), "exe"))
	require.NoError(t, err)
	defer exe.Close()
	require.NoError(t, r.Signal(t.Context(), b.ID, syscall.SIGKILL, false))
	_, err = r.Wait(t.Context(), b.ID)
	require.NoError(t, err)
	_, err = os.OpenFile(filepath.Join("/proc/self/fd", strconv.Itoa(int(exe.Fd()))), os.O_WRONLY, 0)
	require.ErrorIs(t, err, syscall.EROFS)
	require.NoError(t, r.Delete(t.Context(), b.ID))
}

// TestOwnExecLife: State, Pids, Kill and Delete of a process that was executed, and of one that leaves children.
func TestOwnExecLife(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	b := box(t, s, false, containerd.Busybox, "sh", "-c", "while :; do sleep 0.1; done") // it reaps
	require.NoError(t, launch(t.Context(), r, b))
	e, err := addProcess(t, s, b.ID, nil, nil, "sh", "-c", "trap 'exit 4' TERM; echo ready; while :; do sleep 0.05; done")
	require.NoError(t, err)
	require.ErrorContains(t, e.Kill(t.Context(), syscall.SIGTERM), "not started")
	now, err := e.Status(t.Context())
	require.NoError(t, err)
	require.Equal(t, client.Created, now.Status)
	require.NoError(t, e.Start(t.Context()))
	require.Eventually(t, func() bool { return e.stdout.String() == "ready\n" }, testkit.Timeout, testkit.Tick)
	// A Start of the client that fails closes the output, so not before it was read.
	require.Error(t, e.Start(t.Context()), "twice")
	now, err = e.Status(t.Context())
	require.NoError(t, err)
	require.Equal(t, client.Running, now.Status)
	_, err = e.Delete(t.Context())
	require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
	task, _ := processOf(t, s, b.ID)
	pids, err := task.Pids(t.Context())
	require.NoError(t, err)
	found := false
	for _, p := range pids {
		found = found || p.Pid == e.Pid() && strings.Contains(string(p.Info.GetValue()), e.ID())
	}
	require.True(t, found, "%v", pids)
	require.NoError(t, e.Kill(t.Context(), syscall.SIGTERM))
	code, _, _ := e.result(t)
	require.EqualValues(t, 4, code)
	_, err = e.Status(t.Context())
	require.True(t, errdefs.IsNotFound(err), "%v", err)

	// Its children belong to the container, whose first process reaps them.
	code, stdout, _ := execute(t, s, b.ID, nil, "sh", "-c", "(sleep 0.2; echo late) >/dev/null 2>&1 & echo parent")
	require.Zero(t, code)
	require.Equal(t, "parent\n", stdout)
	require.Eventually(t, func() bool {
		_, stdout, _ := execute(t, s, b.ID, nil, "ps")
		return !strings.Contains(stdout, "late") && strings.Count(stdout, "\n") <= 4
	}, testkit.Timeout, testkit.Tick)
	require.NoError(t, r.Delete(t.Context(), b.ID))
}

// TestOwnExecLeavesNothing: many processes, also at once, leave no descriptor and no child in the shim.
func TestOwnExecLeavesNothing(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	id := started(t, s, r, 1)[0]
	_, shim := shimOf(t, s, id)
	count := func() (files, children int) {
		entries, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(shim), "fd"))
		require.NoError(t, err)
		stats, err := filepath.Glob("/proc/[0-9]*/stat")
		require.NoError(t, err)
		for _, f := range stats {
			raw, _ := os.ReadFile(f)
			_, rest, _ := strings.Cut(string(raw), ") ")
			if fields := strings.Fields(rest); len(fields) > 1 && fields[1] == strconv.Itoa(shim) {
				children++
			}
		}
		require.Positive(t, children, "the container")
		return len(entries), children
	}
	execute(t, s, id, nil, "true")
	files, children := count()
	done := make(chan uint32)
	for i := range 12 {
		change := func(*specs.Process) {}
		if i%3 == 0 {
			change = terminal
		}
		go func() {
			code, _, _ := execute(t, s, id, change, "sh", "-c", "exit 3")
			done <- code
		}()
	}
	for range 12 {
		require.EqualValues(t, 3, <-done)
	}
	require.Eventually(t, func() bool {
		nowFiles, nowChildren := count()
		return nowFiles <= files && nowChildren <= children
	}, testkit.Timeout, testkit.Tick)
	require.NoError(t, r.Delete(t.Context(), id))
}

// TestOwnExecEndsWithItsContainer: the end of the processes is reported before that of the container, and Wait returns.
func TestOwnExecEndsWithItsContainer(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	id := started(t, s, r, 1)[0]
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	ended, errs := s.Client.EventService().Subscribe(ctx, `topic=="/tasks/exit"`)
	var running []*execution
	for range 3 {
		e, err := addProcess(t, s, id, nil, nil, "sleep", "1000")
		require.NoError(t, err)
		require.NoError(t, e.Start(t.Context()))
		running = append(running, e)
	}
	require.NoError(t, r.Signal(t.Context(), id, syscall.SIGKILL, false))
	for i := range 4 {
		var event *events.Envelope
		select {
		case event = <-ended:
		case err := <-errs:
			require.NoError(t, err)
		}
		var exit apievents.TaskExit
		require.NoError(t, typeurl.UnmarshalTo(event.Event, &exit))
		require.Equal(t, i == 3, exit.GetID() == id, "event %d is of %s", i, exit.GetID())
		require.EqualValues(t, 137, exit.GetExitStatus())
	}
	for _, e := range running {
		code, _, _ := e.result(t)
		require.EqualValues(t, 137, code)
	}
	// One that its client does not delete does not keep the container.
	require.NoError(t, r.Delete(t.Context(), id))
}

// TestOwnExecEndsWithItsShim kills a shim with a process that was executed. containerd removes it with the rest of the group.
func TestOwnExecEndsWithItsShim(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	id := started(t, s, r, 1)[0]
	_, shim := shimOf(t, s, id)
	task, process := processOf(t, s, id, "sleep", "1000")
	raw, err := typeurl.MarshalAnyToProto(process)
	require.NoError(t, err)
	service := s.Client.TaskService()
	_, err = service.Exec(t.Context(), &tasks.ExecProcessRequest{ContainerID: task.ID(), ExecID: "e", Spec: &anypb.Any{TypeUrl: raw.GetTypeUrl(), Value: raw.GetValue()}})
	require.NoError(t, err)
	resp, err := service.Start(t.Context(), &tasks.StartRequest{ContainerID: id, ExecID: "e"})
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(shim, syscall.SIGKILL))
	require.Eventually(t, func() bool {
		return syscall.Kill(int(resp.GetPid()), 0) != nil && states(t, r)[id] == runtime.TaskNone
	}, testkit.Timeout, testkit.Tick)
	require.NoError(t, r.Delete(t.Context(), id))
}
