package ctrd_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/api/services/introspection/v1"
	"github.com/containerd/containerd/v2/client"
	core "github.com/containerd/containerd/v2/core/introspection"
	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
)

// server returns containerd's process.
type server struct {
	core.Service

	answer *introspection.ServerResponse
	err    error
}

func (s server) Server(context.Context) (*introspection.ServerResponse, error) {
	return s.answer, s.err
}

// TestMountNamespaceOfContainerd: that of its own process if that is visible here, otherwise that of the host's first process.
func TestMountNamespaceOfContainerd(t *testing.T) {
	for name, tc := range map[string]struct {
		server server
		proc   string
		want   string
	}{
		"its own":                  {server{answer: &introspection.ServerResponse{Pid: 77, Pidns: 4026531836}}, ctrd.ProcOfContainerd, "77"},
		"in another PID namespace": {server{answer: &introspection.ServerResponse{Pid: 77, Pidns: 4026531999}}, ctrd.ProcOfContainerd, "1"},
		"an old containerd":        {server{answer: &introspection.ServerResponse{}}, ctrd.ProcOfContainerd, "1"},
		"configured":               {server{err: errdefs.ErrUnavailable}, "5", "5"},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := client.New("", client.WithDefaultNamespace("k8s.io"), client.WithServices(client.WithIntrospectionService(tc.server)))
			require.NoError(t, err)
			root := t.TempDir()
			require.NoError(t, os.MkdirAll(filepath.Join(root, "self", "ns"), 0o700))
			require.NoError(t, os.Symlink("pid:[4026531836]", filepath.Join(root, "self", "ns", "pid")))
			r := &ctrd.Remover{Client: c, ProcRoot: root, HostProc: tc.proc}
			if tc.proc != ctrd.ProcOfContainerd {
				r.HostProc = filepath.Join(root, tc.proc)
			}
			require.ErrorContains(t, r.Unmount(t.Context(), sandboxA), filepath.Join(root, tc.want, "mountinfo")+": no such file")
			put(t, filepath.Join(root, tc.want, "mountinfo"))
			require.NoError(t, r.Unmount(t.Context(), sandboxA))
		})
	}
	c, err := client.New("", client.WithServices(client.WithIntrospectionService(server{err: errdefs.ErrUnavailable})))
	require.NoError(t, err)
	r := &ctrd.Remover{Client: c, ProcRoot: t.TempDir(), HostProc: ctrd.ProcOfContainerd}
	require.True(t, errdefs.IsUnavailable(r.Unmount(t.Context(), sandboxA)), "without an answer no other namespace is searched")
	r.HostProc = ""
	require.NoError(t, r.Unmount(t.Context(), sandboxA))
}
