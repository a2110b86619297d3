package ctrd_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
)

func TestMain(m *testing.M) {
	if strings.HasPrefix(filepath.Base(os.Args[0]), fakeShim) {
		runFakeShim()
		return
	}
	goleak.VerifyTestMain(m)
}

func TestParseHandler(t *testing.T) {
	for handler, want := range map[string]string{
		"runc": "io.containerd.runc.v2", "crun": "io.containerd.runc.v2", "runsc": "io.containerd.runsc.v1",
		"kata": "io.containerd.kata.v2", "io.containerd.other.v1": "io.containerd.other.v1",
	} {
		h, err := ctrd.ParseHandler(handler)
		require.NoError(t, err)
		require.Equal(t, want, h.Name)
	}
	for _, handler := range []string{"", "docker", "run c"} {
		_, err := ctrd.ParseHandler(handler)
		require.True(t, errdefs.IsInvalidArgument(err), handler)
	}
}

func TestHandlerOptions(t *testing.T) {
	for _, c := range []struct {
		handler string
		systemd bool
		shim    string
		want    *runcoptions.Options
	}{
		{"runc", false, "", nil},
		{"runc", false, "/pod1/shims", &runcoptions.Options{ShimCgroup: "/pod1/shims"}},
		{"runc", true, "", &runcoptions.Options{SystemdCgroup: true}},
		{"crun", false, "", &runcoptions.Options{BinaryName: "crun"}},
		{"runsc", true, "/pod1/shims", nil},
	} {
		h, err := ctrd.ParseHandler(c.handler)
		require.NoError(t, err)
		raw, err := h.Options(c.systemd, c.shim)
		require.NoError(t, err)
		if c.want == nil {
			require.Nil(t, raw)
			continue
		}
		require.Equal(t, "containerd.runc.v1.Options", raw.GetTypeUrl())
		var got runcoptions.Options
		require.NoError(t, proto.Unmarshal(raw.GetValue(), &got))
		require.True(t, proto.Equal(c.want, &got))
	}
}

func TestBelongs(t *testing.T) {
	for _, c := range []struct {
		line       string
		ours, wait bool
	}{
		{"/usr/bin/containerd-shim-runc-v2 -namespace k8s.io -id u-1 -address /run/c.sock", true, false},
		{"/usr/bin/containerd-shim-runc-v2 -namespace k8s.io -id u-1 -address /run/c.sock delete", true, true},
		{"/usr/bin/containerd-shim-runc-v2 -namespace k8s.io -id u-10 -address /run/c.sock", false, false},
		{"/usr/bin/containerd-shim-runc-v2 -namespace moby -id u-1 -address /run/c.sock", false, false},
		{"containerd-shim-runc-v2 -id u-1", false, false},
		{"runc --root /run/containerd/runc/k8s.io --log /x create --bundle /b --pid-file /p u-1", true, false},
		{"runc --root /run/containerd/runc/k8s.io delete --force u-1", true, true},
		{"runc --root /run/containerd/runc/other create --bundle /b u-1", false, false},
		{"runc --root /run/containerd/runc/k8s.io create --bundle /b u-2", false, false},
		{"vi -namespace k8s.io -id u-1", false, false},
		{"grep runc u-1", false, false},
		{"", false, false},
	} {
		ours, wait := ctrd.Belongs(c.line, "k8s.io", "u-1")
		require.Equal(t, c.ours, ours, c.line)
		require.Equal(t, c.wait, ours && wait, c.line)
	}
}

func TestShimOfSlotDoesNotBelong(t *testing.T) {
	for line, want := range map[string]bool{
		"containerd-shim-runc-v2 -namespace k8s.io -id slot.1 -address /run/c.sock":                      false,
		"containerd-shim-runc-v2 -namespace k8s.io -id slot.1 -address /run/c.sock delete":               true,
		"runc --root /run/containerd/runc/k8s.io create --bundle /b --pid-file /p slot.1":                true,
		"runc --root /run/containerd/runc/k8s.io --log /b/log.json create --bundle /b --pid-file slot.2": false,
	} {
		ours, _ := ctrd.Belongs(line, "k8s.io", "slot.1")
		require.Equal(t, want, ours, line)
	}
}

func TestIsShimOf(t *testing.T) {
	for line, want := range map[string]bool{
		"/bin/containerd-shim-runc-v2 -namespace k8s.io -id slot.1 -address /run/c.sock":        true,
		"/bin/containerd-shim-runc-v2 -namespace k8s.io -id slot.1 -address /run/c.sock delete": false,
		"/bin/containerd-shim-runc-v2 -namespace moby -id slot.1 -address /run/c.sock":          false,
		"/bin/containerd-shim-runc-v2 -namespace k8s.io -id slot.2 -address /run/c.sock":        false,
		"vi -namespace k8s.io -id slot.1":                                                       false,
	} {
		require.Equal(t, want, ctrd.IsShimOf(line, "k8s.io", "slot.1"), line)
	}
}

func TestGoneAndIDs(t *testing.T) {
	require.True(t, ctrd.IsGone(errors.New("process already finished: not found")))
	require.True(t, ctrd.IsGone(errors.New("write cgroup.procs: no such device")))
	require.False(t, ctrd.IsGone(errors.New("permission denied")))
	require.False(t, ctrd.IsGone(nil))
	require.Equal(t, "/a/fsb-b", ctrd.CgroupsPath([]byte(`{"linux":{"cgroupsPath":"/a/fsb-b"}}`)))
	require.Empty(t, ctrd.CgroupsPath([]byte(`{`)))
	for _, id := range []string{"", ".", "..", "a/b", "../../etc"} {
		require.False(t, ctrd.ValidID(id), id)
		require.True(t, errdefs.IsInvalidArgument((&ctrd.Remover{}).Remove(context.Background(), id)), id)
	}
}

func TestDialDoesNoIO(t *testing.T) {
	c, err := ctrd.Dial("/nowhere/at/all.sock", "k8s.io")
	require.NoError(t, err)
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err = c.Version(ctx)
	require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
}
