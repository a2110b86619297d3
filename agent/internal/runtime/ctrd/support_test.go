package ctrd_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/containerd/api/services/introspection/v1"
	sandboxes "github.com/containerd/containerd/api/services/sandbox/v1"
	"github.com/containerd/containerd/api/services/version/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/shim"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// fakeContainerd answers as a version of containerd does when it is asked what it can do. What it does not implement is noted.
type fakeContainerd struct {
	version.UnimplementedVersionServer
	sandboxes.UnimplementedStoreServer
	introspection.UnimplementedIntrospectionServer

	// number is its version. execute, if not nil, has the shim executed; an older containerd has no such call.
	number  string
	execute func(path string) error

	mu      sync.Mutex
	asked   int // executions of the shim
	unknown []string
}

func (f *fakeContainerd) Version(context.Context, *emptypb.Empty) (*version.VersionResponse, error) {
	return &version.VersionResponse{Version: f.number}, nil
}

func (f *fakeContainerd) List(context.Context, *sandboxes.StoreListRequest) (*sandboxes.StoreListResponse, error) {
	return &sandboxes.StoreListResponse{}, nil
}

func (f *fakeContainerd) PluginInfo(_ context.Context, r *introspection.PluginInfoRequest) (*introspection.PluginInfoResponse, error) {
	if f.execute == nil {
		return nil, status.Error(codes.Unimplemented, "not implemented")
	}
	f.mu.Lock()
	f.asked++
	f.mu.Unlock()
	var request types.RuntimeRequest
	if err := r.GetOptions().UnmarshalTo(&request); err != nil {
		return nil, err
	}
	return &introspection.PluginInfoResponse{}, f.execute(request.GetRuntimePath())
}

// serve serves a containerd on a socket until stop is called.
func (f *fakeContainerd) serve(t *testing.T, socket string, sandboxStore bool) (stop func()) {
	t.Helper()
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	server := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(s)
		f.mu.Lock()
		defer f.mu.Unlock()
		f.unknown = append(f.unknown, method)
		return status.Error(codes.Unimplemented, "unknown service")
	}))
	version.RegisterVersionServer(server, f)
	introspection.RegisterIntrospectionServer(server, f)
	if sandboxStore {
		sandboxes.RegisterStoreServer(server, f)
	}
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(l) }()
	return sync.OnceFunc(func() { server.Stop(); <-done })
}

func (f *fakeContainerd) calledUnknown(part string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.ContainsFunc(f.unknown, func(m string) bool { return strings.Contains(m, part) })
}

func runs(string) error { return nil }

// supportRuntime returns a runtime with a handler, and the socket that its containerd listens on.
func supportRuntime(t *testing.T, handler string) (*ctrd.Runtime, string) {
	t.Helper()
	dir := t.TempDir()
	socket := filepath.Join(dir, "c.sock")
	client, err := shared.Dial(socket, shared.DefaultNamespace)
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	h, err := shared.ParseHandler(handler)
	require.NoError(t, err)
	for _, name := range []string{"shim", shim.Member, "init", "sandbox-helper"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("program"), 0o600))
	}
	r := ctrd.New(ctrd.Config{
		Client: client, Handler: h, LogRoot: dir, NetNSPath: "/proc/self/ns/net", CgroupRoot: filepath.Join(dir, "cgroup"),
		SlotRoot: filepath.Join(dir, "slots"), SandboxInit: filepath.Join(dir, "init"), Shim: filepath.Join(dir, "shim"),
	})
	t.Cleanup(r.Close)
	return r, socket
}

// TestContainerdOfTheHandler has a containerd of each version, and the handlers that need more and less of it.
func TestContainerdOfTheHandler(t *testing.T) {
	for name, c := range map[string]struct {
		containerd *fakeContainerd
		store      bool
		handler    string
		want       []string // in the error
	}{
		"1.6 with fsb":  {&fakeContainerd{number: "1.6.20"}, false, "fsb", []string{"containerd 1.6.20 has no sandbox store", "upgrade containerd to 2.0", "runtimeHandler: runc"}},
		"1.7 with fsb":  {&fakeContainerd{number: "1.7.29"}, true, "fsb", []string{"containerd 1.7.29 has no support for shims of version 3", "runtimeHandler: runc"}},
		"2.0 with fsb":  {&fakeContainerd{number: "2.0.0", execute: runs}, true, "fsb", nil},
		"1.6 with runc": {&fakeContainerd{number: "1.6.20"}, false, "runc", nil},
		"1.7 with crun": {&fakeContainerd{number: "1.7.29"}, true, "crun", nil},
		"noexec": {&fakeContainerd{number: "2.0.0", execute: func(string) error {
			return status.Error(codes.Unknown, "failed to run the shim: permission denied")
		}}, true, "fsb", []string{"cannot execute the shim", "permission denied", "--slot-root"}},
	} {
		t.Run(name, func(t *testing.T) {
			r, socket := supportRuntime(t, c.handler)
			t.Cleanup(c.containerd.serve(t, socket, c.store))
			for range 2 {
				err := r.Ping(t.Context())
				if c.want == nil {
					require.NoError(t, err)
					continue
				}
				require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
				require.Equal(t, fault.RuntimeUnavailable, fault.ReasonOf(err))
				for _, part := range c.want {
					require.ErrorContains(t, err, part)
				}
			}
			if c.want == nil && c.handler == "fsb" {
				require.Equal(t, 1, c.containerd.asked, "a success is remembered")
			}
		})
	}
}

// TestOldContainerdStartsNoShim: containerd 1.7 would start a shim, refuse it, and leave its process.
func TestOldContainerdStartsNoShim(t *testing.T) {
	for name, store := range map[string]bool{"1.6": false, "1.7": true} {
		t.Run(name, func(t *testing.T) {
			r, socket := supportRuntime(t, "fsb")
			old := &fakeContainerd{number: name}
			t.Cleanup(old.serve(t, socket, store))
			id := identity.SlotID("0123456789abcdef0123")
			log := filepath.Join(filepath.Dir(socket), id, shared.OutputFile)
			require.NoError(t, os.Mkdir(filepath.Dir(log), 0o700))
			err := r.StartSlot(t.Context(), runtime.Slot{ID: id, LogPath: log})
			require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
			require.Equal(t, fault.RuntimeUnavailable, fault.ReasonOf(err))
			require.ErrorContains(t, err, "containerd "+name+" has no ")
			require.False(t, old.calledUnknown("Tasks"), "a task was created")
			require.False(t, old.calledUnknown("Containers"), "a container was recorded")
		})
	}
}

// TestContainerdIsReplaced: another version answers after containerd was away, older and newer.
func TestContainerdIsReplaced(t *testing.T) {
	r, socket := supportRuntime(t, "fsb")
	for _, c := range []struct {
		containerd *fakeContainerd
		ok         bool
	}{
		{&fakeContainerd{number: "2.4.0", execute: runs}, true}, {&fakeContainerd{number: "1.7.29"}, false}, {&fakeContainerd{number: "2.0.0", execute: runs}, true},
	} {
		stop := c.containerd.serve(t, socket, true)
		var err error
		require.Eventually(t, func() bool { err = r.Ping(t.Context()); return !errdefs.IsUnavailable(err) }, testkit.Timeout, testkit.Tick)
		if c.ok {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, "containerd 1.7.29 has no ")
		}
		stop()
		require.Eventually(t, func() bool { return errdefs.IsUnavailable(r.Ping(t.Context())) }, testkit.Timeout, testkit.Tick)
	}
}
