package ctrd_test

import (
	"slices"
	"testing"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
)

// TestCapabilities: a pool can add three capabilities and no other.
func TestCapabilities(t *testing.T) {
	base := ctrd.Capability(nil)
	for _, name := range []string{"CAP_NET_RAW", "CAP_MKNOD", "CAP_AUDIT_WRITE", "CAP_SYS_ADMIN"} {
		require.NotContains(t, base, name)
	}
	require.Contains(t, base, "CAP_NET_BIND_SERVICE")
	require.Equal(t, append(slices.Clone(base), "CAP_MKNOD"), ctrd.Capability([]string{"MKNOD"}))
	require.Equal(t, append(slices.Clone(base), "CAP_NET_RAW", "CAP_MKNOD", "CAP_AUDIT_WRITE"), ctrd.Capability([]string{"AUDIT_WRITE", "MKNOD", "NET_RAW"}))
	require.Equal(t, base, ctrd.Capability([]string{"SYS_ADMIN"}), "one that was not checked")

	require.NoError(t, ctrd.CheckCapabilities(nil))
	require.NoError(t, ctrd.CheckCapabilities(ctrd.GrantableCapabilities()))
	err := ctrd.CheckCapabilities([]string{"NET_RAW", "SYS_ADMIN", "CAP_MKNOD"})
	require.True(t, errdefs.IsInvalidArgument(err), "%v", err)
	require.ErrorContains(t, err, `"SYS_ADMIN", "CAP_MKNOD" cannot be added`)
}

// TestRlimits: whatever containerd has, a sandbox has these.
func TestRlimits(t *testing.T) {
	limits := ctrd.Rlimits()
	require.Contains(t, limits, specs.POSIXRlimit{Type: "RLIMIT_CORE"})
	require.True(t, slices.ContainsFunc(limits, func(l specs.POSIXRlimit) bool {
		return l.Type == "RLIMIT_NOFILE" && l.Soft == l.Hard && l.Hard > 0 && l.Hard <= 65_536
	}), "%v", limits)
}
