package inside_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/utils/clock"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/inside"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const lines = 4

// mesh is one that breaks what its fields say.
type mesh struct {
	sandboxv1.SandboxServiceClient
	processv1.ProcessServiceClient
	filesystemv1.FilesystemServiceClient

	// cut breaks each stream of output after so many bytes, and skip loses as many after the cut; code is the exit code of processes.
	cut, skip int
	code      int32
	// forget makes processes unknown after a cut, gone the container another one.
	forget, gone bool
	// torn keeps the first half of what is written, unanswered makes every other write and answers none of these.
	torn, unanswered bool

	mu      sync.Mutex
	writes  int
	content []byte
	deleted []string
}

func typed(class error, reason fault.Reason) error {
	return rpc.ToStatus(fault.New(class, reason, "says the server"))
}

func (m *mesh) CreateSandbox(_ context.Context, in *sandboxv1.CreateSandboxRequest, _ ...grpc.CallOption) (*sandboxv1.CreateSandboxResponse, error) {
	return &sandboxv1.CreateSandboxResponse{Sandbox: sandbox(in.GetName(), "1")}, nil
}

func sandbox(name, id string) *sandboxv1.Sandbox {
	return &sandboxv1.Sandbox{Name: name, Uid: "u", Status: &sandboxv1.SandboxStatus{Phase: sandboxv1.Phase_PHASE_RUNNING, SandboxId: id}}
}

func (m *mesh) GetSandbox(_ context.Context, in *sandboxv1.GetSandboxRequest, _ ...grpc.CallOption) (*sandboxv1.GetSandboxResponse, error) {
	id := "1"
	if m.gone {
		id = "2"
	}
	return &sandboxv1.GetSandboxResponse{Sandbox: sandbox(in.GetName(), id)}, nil
}

func (m *mesh) DeleteSandbox(_ context.Context, in *sandboxv1.DeleteSandboxRequest, _ ...grpc.CallOption) (*sandboxv1.DeleteSandboxResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.deleted = append(m.deleted, in.GetName())
	return &sandboxv1.DeleteSandboxResponse{}, nil
}

// events is a stream of the output from an offset on.
type events[M any] struct {
	grpc.ClientStream
	list []M
	end  error
}

func (e *events[M]) Recv() (*M, error) {
	if len(e.list) == 0 {
		return nil, e.end
	}
	next := e.list[0]
	e.list = e.list[1:]
	return &next, nil
}

func (m *mesh) output(from int) (list []*processv1.ProcessEvent, end error) {
	var all strings.Builder
	for i := range lines {
		fmt.Fprintf(&all, "line %d\n", i)
	}
	list = append(list, &processv1.ProcessEvent{Event: &processv1.ProcessEvent_Started{Started: &processv1.Process{Pid: 7}}})
	rest := all.String()[from:]
	cut := m.cut > 0 && len(rest) > m.cut
	if cut {
		rest = rest[:m.cut]
	}
	if from > 0 {
		from, rest = from+m.skip, rest[min(m.skip, len(rest)):]
	}
	list = append(list, &processv1.ProcessEvent{Event: &processv1.ProcessEvent_Output{Output: &processv1.ProcessOutput{Offset: int64(from), Data: []byte(rest)}}})
	if cut {
		return list, status.Error(codes.Unavailable, "connection reset by peer")
	}
	return append(list, &processv1.ProcessEvent{Event: &processv1.ProcessEvent_Ended{Ended: &processv1.ProcessExit{Code: m.code}}}), io.EOF
}

func (m *mesh) StartProcess(context.Context, *processv1.StartProcessRequest, ...grpc.CallOption) (grpc.ServerStreamingClient[processv1.StartProcessResponse], error) {
	e := &events[processv1.StartProcessResponse]{}
	var list []*processv1.ProcessEvent
	list, e.end = m.output(0)
	for _, x := range list {
		e.list = append(e.list, processv1.StartProcessResponse{Event: x})
	}
	return e, nil
}

func (m *mesh) ConnectProcess(_ context.Context, in *processv1.ConnectProcessRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[processv1.ConnectProcessResponse], error) {
	if m.forget {
		return nil, typed(errdefs.ErrNotFound, fault.ProcessNotFound)
	}
	e := &events[processv1.ConnectProcessResponse]{}
	var list []*processv1.ProcessEvent
	list, e.end = m.output(int(in.GetFromOffset()))
	for _, x := range list {
		e.list = append(e.list, processv1.ConnectProcessResponse{Event: x})
	}
	return e, nil
}

type upload struct {
	grpc.ClientStream
	mesh *mesh
	data []byte
}

func (u *upload) Send(m *filesystemv1.WriteFileRequest) error {
	u.data = append(u.data, m.GetData()...)
	return nil
}

func (u *upload) CloseAndRecv() (*filesystemv1.WriteFileResponse, error) {
	u.mesh.mu.Lock()
	defer u.mesh.mu.Unlock()
	u.mesh.writes++
	if u.mesh.torn {
		u.data = u.data[:len(u.data)/2]
	}
	if u.mesh.unanswered && u.mesh.writes > 1 {
		if u.mesh.writes%2 == 0 {
			u.mesh.content = u.data
		}
		return nil, status.Error(codes.Unavailable, "connection reset by peer")
	}
	u.mesh.content = u.data
	return &filesystemv1.WriteFileResponse{}, nil
}

func (m *mesh) WriteFile(context.Context, ...grpc.CallOption) (grpc.ClientStreamingClient[filesystemv1.WriteFileRequest, filesystemv1.WriteFileResponse], error) {
	return &upload{mesh: m}, nil
}

func (m *mesh) ReadFile(context.Context, *filesystemv1.ReadFileRequest, ...grpc.CallOption) (grpc.ServerStreamingClient[filesystemv1.ReadFileResponse], error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return &events[filesystemv1.ReadFileResponse]{list: []filesystemv1.ReadFileResponse{{Data: m.content}}, end: io.EOF}, nil
}

func run(t *testing.T, m *mesh) inside.Result {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errors.New("enough"))
	defer cancel()
	r := inside.Run(ctx, inside.Config{
		Sandboxes: m, Processes: m, Files: m, Clock: clock.RealClock{}, Prefix: "x-", Users: 1, Lines: lines, Every: time.Millisecond, FileBytes: 100,
	})
	require.NotEmpty(t, m.deleted, "the sandboxes are deleted")
	return r
}

func TestGood(t *testing.T) {
	for name, m := range map[string]*mesh{"calm": {}, "streams break": {cut: 10}, "writes are not answered": {unanswered: true}} {
		t.Run(name, func(t *testing.T) {
			r := run(t, m)
			require.Empty(t, r.Broken)
			require.Positive(t, r.Processes)
			require.Positive(t, r.Writes)
			require.Zero(t, r.Replaced)
		})
	}
}

func TestReplaced(t *testing.T) {
	r := run(t, &mesh{cut: 10, forget: true, gone: true})
	require.Empty(t, r.Broken, "a process ends with its sandbox")
	require.Positive(t, r.Replaced)
}

func TestBroken(t *testing.T) {
	for name, c := range map[string]struct {
		mesh *mesh
		says string
	}{
		"output is lost":       {&mesh{cut: 10, skip: 3}, "continues at"},
		"a process is unknown": {&mesh{cut: 10, forget: true}, "unknown"},
		"a process fails":      {&mesh{code: 9}, "exited with 9"},
		"half a file is read":  {&mesh{torn: true}, "not what was written"},
	} {
		t.Run(name, func(t *testing.T) {
			r := run(t, c.mesh)
			require.NotEmpty(t, r.Broken)
			require.Contains(t, strings.Join(r.Broken, "\n"), c.says)
		})
	}
}
