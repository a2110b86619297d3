package cmd_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// fakeProcesses starts processes that do what run says.
type fakeProcesses struct {
	processv1.UnimplementedProcessServiceServer
	started chan *processv1.StartProcessRequest
	run     func(ctx context.Context, output func(string)) (*processv1.ProcessExit, error)
}

func (f *fakeProcesses) StartProcess(in *processv1.StartProcessRequest, stream grpc.ServerStreamingServer[processv1.StartProcessResponse]) error {
	f.started <- in
	send := func(e *processv1.ProcessEvent) { _ = stream.Send(&processv1.StartProcessResponse{Event: e}) }
	send(&processv1.ProcessEvent{Event: &processv1.ProcessEvent_Started{Started: &processv1.Process{Pid: 42}}})
	offset := int64(0)
	exit, err := f.run(stream.Context(), func(text string) {
		send(&processv1.ProcessEvent{Event: &processv1.ProcessEvent_Output{Output: &processv1.ProcessOutput{
			Stream: processv1.ProcessOutput_STREAM_TERMINAL, Offset: offset, Data: []byte(text),
		}}})
		offset += int64(len(text))
	})
	if err != nil {
		return err
	}
	send(&processv1.ProcessEvent{Event: &processv1.ProcessEvent_Ended{Ended: exit}})
	return nil
}

func (f *fakeProcesses) StreamInput(stream grpc.ClientStreamingServer[processv1.StreamInputRequest, processv1.StreamInputResponse]) error {
	for {
		if _, err := stream.Recv(); errors.Is(err, io.EOF) {
			return stream.SendAndClose(&processv1.StreamInputResponse{})
		} else if err != nil {
			return err
		}
	}
}

func (f *fakeProcesses) ListProcesses(context.Context, *processv1.ListProcessesRequest) (*processv1.ListProcessesResponse, error) {
	return &processv1.ListProcessesResponse{Processes: []*processv1.Process{
		{Pid: 2, Tag: "main", Args: []string{"httpd"}}, {Pid: 7, Args: []string{"sleep", "9"}}, {Pid: 8, Tag: "build", Args: []string{"make"}},
		{Pid: 9, Tag: "over", Exit: &processv1.ProcessExit{}},
	}}, nil
}

func (f *fakeProcesses) CloseInput(context.Context, *processv1.CloseInputRequest) (*processv1.CloseInputResponse, error) {
	return &processv1.CloseInputResponse{}, nil
}

func (f *fakeProcesses) SendSignal(context.Context, *processv1.SendSignalRequest) (*processv1.SendSignalResponse, error) {
	return &processv1.SendSignalResponse{}, nil
}

// terminal returns both ends of a terminal: the user's, and the one of the program.
func terminal(t *testing.T) (user, program *os.File) {
	t.Helper()
	user, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetPointerInt(int(user.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(user.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = user.Close(); _ = program.Close() })
	return user, program
}

func mode(t *testing.T, f *os.File) unix.Termios {
	t.Helper()
	m, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	require.NoError(t, err)
	return *m
}

// TestRawModeIsRestored has each end of a session at a terminal.
func TestRawModeIsRestored(t *testing.T) {
	wait := func(ctx context.Context, _ func(string)) (*processv1.ProcessExit, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	for name, tc := range map[string]struct {
		run  func(context.Context, func(string)) (*processv1.ProcessExit, error)
		keys string
		stop bool
		code int
	}{
		"exit": {run: func(_ context.Context, output func(string)) (*processv1.ProcessExit, error) {
			output("done")
			return &processv1.ProcessExit{Code: 7}, nil
		}, code: 7},
		"detached": {run: wait, keys: "ls\n\x10\x11", code: 0},
		"ended":    {run: wait, stop: true, code: 130},
		"failed": {run: func(context.Context, func(string)) (*processv1.ProcessExit, error) {
			return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "it was deleted")
		}, code: 3},
	} {
		t.Run(name, func(t *testing.T) {
			user, program := terminal(t)
			before := mode(t, program)
			release := make(chan struct{})
			f := &fakeProcesses{started: make(chan *processv1.StartProcessRequest, 1), run: func(ctx context.Context, output func(string)) (*processv1.ProcessExit, error) {
				select {
				case <-release:
				case <-ctx.Done():
				}
				return tc.run(ctx, output)
			}}
			b := start(t, &fake{processes: f})
			b.terminal = program
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			done := make(chan result, 1)
			go func() { done <- b.runIn(ctx, "exec", "-it", "web", "--", "sh") }()
			require.NotNil(t, (<-f.started).GetTerminal())
			require.Eventually(t, func() bool { return mode(t, program).Lflag&unix.ECHO == 0 }, 10*time.Second, time.Millisecond, "raw mode")
			close(release)
			_, err := user.WriteString(tc.keys)
			require.NoError(t, err)
			if tc.stop {
				cancel()
			}
			r := <-done
			require.Equal(t, tc.code, r.code, r.err)
			require.Equal(t, before, mode(t, program))
		})
	}
}

// TestRunInteractive creates a sandbox without a process and runs the command in it.
func TestRunInteractive(t *testing.T) {
	f := &fakeProcesses{started: make(chan *processv1.StartProcessRequest, 1), run: func(_ context.Context, output func(string)) (*processv1.ProcessExit, error) {
		output("hello\r\n")
		return &processv1.ProcessExit{Code: 5}, nil
	}}
	w := newLiveAllocator(0)
	allocator := w.fake()
	allocator.processes = f
	b := start(t, allocator)
	for _, rm := range []bool{false, true} {
		args := []string{"run", "-it", "box", "--image", "img", "-q", "--", "sh", "-c", "exit 5"}
		if rm {
			args = append([]string{"run", "--rm"}, args[1:]...)
		}
		r := b.run(t, args...)
		require.Equal(t, 5, r.code, r.err)
		require.Equal(t, "hello\r\n", r.out)
		in := <-f.started
		require.Equal(t, []string{"sh", "-c", "exit 5"}, in.GetProcess().GetArgs())
		require.Equal(t, "box", in.GetName())
		require.True(t, in.GetStdin())
		require.NotNil(t, in.GetTerminal())
		spec := w.creates[len(w.creates)-1].GetSpec()
		require.True(t, spec.GetKeepAlive())
		require.Empty(t, spec.GetCommand())
		require.Equal(t, rm, w.sandboxes["box"] == nil)
	}
	require.Len(t, w.deletes, 1)
	for line, want := range map[string]string{
		"run -it --image x":                        "a COMMAND is required",
		"run -it --attach --image x -- sh":         "--attach is for",
		"run -t --keep-entrypoint --image x -- sh": "--keep-entrypoint does not go with",
	} {
		r := b.run(t, strings.Fields(line)...)
		require.Equal(t, 2, r.code)
		require.Contains(t, r.err, want)
	}
	require.Len(t, w.creates, 2)
}

// TestRunInteractiveDetached: --rm does not delete what runs on.
func TestRunInteractiveDetached(t *testing.T) {
	f := &fakeProcesses{started: make(chan *processv1.StartProcessRequest, 1), run: func(ctx context.Context, _ func(string)) (*processv1.ProcessExit, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}}
	w := newLiveAllocator(0)
	allocator := w.fake()
	allocator.processes = f
	b := start(t, allocator)
	user, program := terminal(t)
	b.terminal = program
	done := make(chan result, 1)
	go func() { done <- b.run(t, "run", "-it", "--rm", "box", "--image", "img", "--", "sh") }()
	<-f.started
	require.Eventually(t, func() bool { return mode(t, program).Lflag&unix.ECHO == 0 }, 10*time.Second, time.Millisecond)
	_, err := user.WriteString("\x10\x11")
	require.NoError(t, err)
	r := <-done
	require.Zero(t, r.code, r.err)
	require.Contains(t, r.err, `fsb-ctl attach box 42`)
	require.Contains(t, r.err, `sandbox "box" is not deleted`)
	require.Empty(t, w.deletes)
}

// TestPlugin starts the program as kubectl does.
func TestPlugin(t *testing.T) {
	b := start(t, &fake{get: func(context.Context, *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
		return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "none")
	}, list: func(context.Context, *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error) {
		return &sandboxv1.ListSandboxesResponse{Sandboxes: []*sandboxv1.Sandbox{running("web")}}, nil
	}})
	b.name = "kubectl-fsb"
	for _, command := range []string{"run", "exec", "attach", "ps", "kill", "cp", "port-forward", "logs", "delete", "gc explain"} {
		r := b.run(t, append(strings.Fields(command), "--help")...)
		require.Zero(t, r.code, r.err)
		require.Contains(t, r.out, "kubectl fsb "+command)
		require.NotContains(t, r.out, "fsb-ctl", command)
	}
	r := b.run(t, "get", "web")
	require.Equal(t, 3, r.code)
	require.Contains(t, r.err, "hint: kubectl fsb list")
	r = b.run(t, "cp", "a", "b")
	require.Contains(t, r.err, "hint: kubectl fsb cp --help")
	b.name = "kubectl_complete-fsb"
	r = b.run(t, "port-forward", "")
	require.Equal(t, "web\n:4\n", r.out)
}

// TestProcessCompletion completes what kill and attach take, and the values of flags.
func TestProcessCompletion(t *testing.T) {
	b := start(t, &fake{processes: &fakeProcesses{}})
	for line, want := range map[string]string{
		"kill web ":        "main\n7\tsleep 9\nbuild\n:4\n",
		"attach web ":      "main\n7\tsleep 9\nbuild\n:4\n",
		"kill web 7 -s K":  "TERM\nINT\nHUP\nKILL\nQUIT\nUSR1\nUSR2\nSTOP\nCONT\nWINCH\n:4\n",
		"exec web --user ": ":4\n",
	} {
		r := b.run(t, append([]string{"__complete"}, strings.Split(line, " ")...)...)
		require.Equal(t, want, r.out, line)
	}
}

// TestProcessCommandsRefuse has what the command line refuses before it calls anything.
func TestProcessCommandsRefuse(t *testing.T) {
	b := start(t, &fake{processes: &fakeProcesses{}})
	for line, want := range map[string]string{
		"exec":                       "NAME is required",
		"exec web":                   "a COMMAND is required",
		"exec web -e X -- ls":        `--env "X" is not NAME=VALUE`,
		"exec web --limit -1s -- ls": "--limit is -1s",
		"kill web 7 -s NOPE":         `--signal "NOPE" is no signal`,
		"kill web":                   "PID|TAG is missing",
		"attach":                     "want NAME [PID|TAG]",
		"attach web main":            "fsb-ctl logs -f web",
	} {
		r := b.run(t, strings.Fields(line)...)
		require.Equal(t, 2, r.code, "%s: %s", line, r.err)
		require.Contains(t, r.err, want)
		require.Empty(t, r.out)
	}
	r := b.run(t, "attach", "web", "nope")
	require.Equal(t, 3, r.code, r.err)
	require.Contains(t, r.err, "(PROCESS_NOT_FOUND)")
}
