package claim_test

import (
	"testing"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
)

func TestFromSpec(t *testing.T) {
	oom, umask := -5, uint32(0o77)
	s := &specs.Spec{Hostname: "box", Process: &specs.Process{
		Args: []string{"sh"}, Env: []string{"A=1", "B=2", "A=3", "nothing", "HOME="}, Cwd: "/work", NoNewPrivileges: true, ApparmorProfile: "cri",
		User:        specs.User{UID: 7, GID: 8, AdditionalGids: []uint32{8, 9}, Umask: &umask},
		OOMScoreAdj: &oom, Rlimits: []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1, Hard: 2}},
		Capabilities: &specs.LinuxCapabilities{
			Bounding: []string{"CAP_CHOWN", "CAP_CHECKPOINT_RESTORE"}, Effective: []string{"CAP_SYS_ADMIN"}, Permitted: []string{"CAP_SETFCAP"},
			Inheritable: []string{"CAP_AUDIT_WRITE"}, Ambient: []string{"CAP_BPF"},
		},
	}}
	got, err := claim.FromSpec(s)
	require.NoError(t, err)
	adj := int32(-5)
	require.Equal(t, &claim.Claim{
		Args: []string{"sh"}, Env: []string{"A=3", "B=2", "HOME=/"}, Cwd: "/work", UID: 7, GID: 8, Groups: []uint32{8, 9}, Hostname: "box",
		NoNewPrivs: true, AppArmorProfile: "cri", OOMScoreAdj: &adj, Umask: &umask, Rlimits: []claim.Rlimit{{Resource: unix.RLIMIT_NOFILE, Soft: 1, Hard: 2}},
		Capabilities: claim.Capabilities{
			Bounding: 1<<unix.CAP_CHOWN | 1<<unix.CAP_CHECKPOINT_RESTORE, Effective: 1 << unix.CAP_SYS_ADMIN, Permitted: 1 << unix.CAP_SETFCAP,
			Inheritable: 1 << unix.CAP_AUDIT_WRITE, Ambient: 1 << unix.CAP_BPF,
		},
	}, got)

	s.Process.Env = nil
	got, err = claim.FromSpec(s)
	require.NoError(t, err)
	require.Equal(t, []string{"HOME=/"}, got.Env)
}

func TestInvalidSpecs(t *testing.T) {
	for _, c := range []struct {
		name string
		spec *specs.Spec
		is   func(error) bool
	}{
		{"no process", &specs.Spec{}, errdefs.IsInvalidArgument},
		{"a terminal", &specs.Spec{Process: &specs.Process{Terminal: true}}, errdefs.IsNotImplemented},
		{"an unknown capability", &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{Ambient: []string{"CAP_FLY"}}}}, errdefs.IsInvalidArgument},
		{"an unknown limit", &specs.Spec{Process: &specs.Process{Rlimits: []specs.POSIXRlimit{{Type: "RLIMIT_FUN"}}}}, errdefs.IsInvalidArgument},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := claim.FromSpec(c.spec)
			require.True(t, c.is(err), "%v", err)
		})
	}
}
