package mesh_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestCanary: whatever is done to its directory is noticed, once.
func TestCanary(t *testing.T) {
	for name, harm := range map[string]func(c *mesh.Canary) error{
		"":            func(*mesh.Canary) error { return nil },
		"a new file":  func(c *mesh.Canary) error { return os.WriteFile(filepath.Join(c.Dir, "written"), nil, 0o600) },
		"a directory": func(c *mesh.Canary) error { return os.Mkdir(filepath.Join(c.Dir, "made"), 0o700) },
		"a change":    func(c *mesh.Canary) error { return os.WriteFile(c.Path, []byte("x"), 0o600) },
		"a deletion":  func(c *mesh.Canary) error { return os.Remove(c.Path) },
	} {
		t.Run(name, func(t *testing.T) {
			c, err := mesh.NewCanary(t.TempDir())
			require.NoError(t, err)
			require.NoError(t, harm(c))
			touched, err := c.Touched()
			require.NoError(t, err)
			require.Equal(t, name != "", touched != "", touched)
			touched, err = c.Touched()
			require.NoError(t, err)
			require.Empty(t, touched, "it is restored")
			raw, err := os.ReadFile(c.Path)
			require.NoError(t, err)
			require.Equal(t, c.Secret, string(raw))
			c.Remove()
			require.NoDirExists(t, c.Dir)
		})
	}
}

func TestTyped(t *testing.T) {
	require.True(t, mesh.Typed(rpc.ToStatus(fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "x"))))
	require.False(t, mesh.Typed(status.Error(codes.Internal, "x")))
	require.False(t, mesh.Typed(status.Error(codes.NotFound, "x")), "without a reason")
}

func TestPortOf(t *testing.T) {
	p := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "agent", ContainerPort: 7}}}}}, Status: corev1.PodStatus{PodIP: "1.2.3.4"}}
	address, err := mesh.PortOf(p, "agent")
	require.NoError(t, err)
	require.Equal(t, "1.2.3.4:7", address)
	_, err = mesh.PortOf(p, "other")
	require.Error(t, err)
}

func TestProcesses(t *testing.T) {
	own, err := os.Executable()
	require.NoError(t, err)
	require.Contains(t, mesh.Executing(own), os.Getpid())
	require.Positive(t, mesh.Resident(own))
	require.Zero(t, mesh.Resident("/nowhere"))
}
