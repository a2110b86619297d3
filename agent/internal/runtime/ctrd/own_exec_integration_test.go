//go:build integration

package ctrd_test

import (
	"bytes"
	"context"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/google/uuid"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// execution is a process that was executed in a container.
type execution struct {
	client.Process
	stdout, stderr *output
	exit           <-chan client.ExitStatus
}

// output is what a process has printed until now.
type output struct {
	mu      sync.Mutex
	printed bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.printed.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.printed.String()
}

// processOf returns the task of a container, and the spec of its process with other arguments, as ctr makes it.
func processOf(t *testing.T, s *containerd.Server, id string, args ...string) (client.Task, *specs.Process) {
	t.Helper()
	c, err := s.Client.LoadContainer(t.Context(), id)
	require.NoError(t, err)
	spec, err := c.Spec(t.Context())
	require.NoError(t, err)
	task, err := c.Task(t.Context(), nil)
	require.NoError(t, err)
	spec.Process.Args = args
	return task, spec.Process
}

// addProcess adds a process to a container, and does not start it.
func addProcess(t *testing.T, s *containerd.Server, id string, stdin io.Reader, change func(*specs.Process), args ...string) (*execution, error) {
	t.Helper()
	task, process := processOf(t, s, id, args...)
	if change != nil {
		change(process)
	}
	e := &execution{stdout: &output{}, stderr: &output{}}
	streams := cio.WithStreams(stdin, e.stdout, e.stderr)
	options := []cio.Opt{streams, cio.WithFIFODir(t.TempDir())}
	if process.Terminal {
		options = append(options, cio.WithTerminal)
	}
	var err error
	if e.Process, err = task.Exec(t.Context(), uuid.NewString(), process, cio.NewCreator(options...)); err != nil {
		return nil, err
	}
	e.exit, err = e.Wait(t.Context())
	require.NoError(t, err)
	return e, nil
}

// result waits for the end of a process, and deletes it.
func (e *execution) result(t *testing.T) (code uint32, stdout, stderr string) {
	t.Helper()
	select {
	case exit := <-e.exit:
		require.NoError(t, exit.Error())
		code = exit.ExitCode()
	case <-time.After(testkit.Timeout):
		t.Fatal("the process does not end")
	}
	e.IO().Wait() // as ctr does: the output ends before the process is deleted
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	status, err := e.Delete(ctx)
	require.NoError(t, err)
	require.Equal(t, code, status.ExitCode())
	return code, e.stdout.String(), e.stderr.String()
}

// execute executes a process in a container, and waits until it ends.
func execute(t *testing.T, s *containerd.Server, id string, change func(*specs.Process), args ...string) (code uint32, stdout, stderr string) {
	t.Helper()
	e, err := addProcess(t, s, id, nil, change, args...)
	require.NoError(t, err)
	require.NoError(t, e.Start(t.Context()))
	return e.result(t)
}

func TestOwnExec(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	for _, id := range started(t, s, r, 2) {
		code, stdout, stderr := execute(t, s, id, nil, "sh", "-c", "echo out; echo err >&2; exit 7")
		require.EqualValues(t, 7, code)
		require.Equal(t, "out\n", stdout)
		require.Equal(t, "err\n", stderr)
		require.NoError(t, r.Delete(t.Context(), id))
	}
}
