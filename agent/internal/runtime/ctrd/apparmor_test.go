package ctrd_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/apparmor"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// TestAppArmorFollowsShims: what the shim that was started last has found out counts, until a sandbox cannot have the profile.
func TestAppArmorFollowsShims(t *testing.T) {
	c := ctrd.NewConfinement(apparmor.Status{Off: "unknown"})
	require.Empty(t, c.Profile())
	dir := t.TempDir()
	require.NoError(t, apparmor.Write(dir, apparmor.Status{Profile: apparmor.Name()}))
	c.ShimStarted(filepath.Join(dir, "shim"))
	require.Equal(t, apparmor.Name(), c.Profile())

	c.Observe(nil)
	c.Observe(errors.New("other"))
	c.Observe(fmt.Errorf("claiming: %w", &claim.Failure{Stage: wire.StageExec, Errno: syscall.ENOENT}))
	require.Equal(t, apparmor.Name(), c.Profile())
	c.Observe(fmt.Errorf("claiming: %w", &claim.Failure{Stage: wire.StageAppArmor, Errno: syscall.ENOENT}))
	require.Empty(t, c.Profile())
	require.Contains(t, c.Get().Off, "setting the AppArmor profile")

	c.ShimStarted(filepath.Join(dir, "shim"))
	require.Equal(t, apparmor.Name(), c.Profile())
	c.ShimStarted(filepath.Join(dir, "none", "shim"))
	require.Contains(t, c.Get().Off, "has not reported")
}
