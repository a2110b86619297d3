package plan_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// within is the confinement of a container's first process.
func within() *wire.Claim {
	oom := int32(100)
	caps := uint64(1<<unix.CAP_CHOWN | 1<<unix.CAP_KILL)
	return &wire.Claim{
		Capabilities: wire.Capabilities{Bounding: caps, Effective: caps, Permitted: caps}, NoNewPrivs: true, Seccomp: make([]byte, 16), SeccompFlags: 2,
		Rlimits: []wire.Rlimit{{Resource: unix.RLIMIT_NOFILE, Soft: 10, Hard: 20}}, OOMScoreAdj: &oom, AppArmorProfile: "sandbox",
	}
}

func parseExec(t *testing.T, p *specs.Process, terminal bool) (*wire.Exec, error) {
	t.Helper()
	raw, err := json.Marshal(p)
	require.NoError(t, err)
	return plan.ParseExec(raw, terminal, within())
}

// TestExecCompletes: what a process spec leaves out is as in the first process.
func TestExecCompletes(t *testing.T) {
	e, err := parseExec(t, &specs.Process{
		Args: []string{"a", "b"}, Env: []string{"K=v"}, Cwd: "/w", User: specs.User{UID: 5, GID: 6, AdditionalGids: []uint32{7}}, ConsoleSize: &specs.Box{Height: 1, Width: 70_000},
	}, true)
	require.NoError(t, err)
	want := within()
	want.Args, want.Env, want.Cwd, want.UID, want.GID, want.Groups = []string{"a", "b"}, []string{"K=v", "HOME=/"}, "/w", 5, 6, []uint32{7}
	require.Equal(t, &wire.Exec{Claim: want, Terminal: &wire.Terminal{Rows: 1, Columns: 65535}}, e)
}

// TestExecNarrows: a process may have less than the first one, and never its filter or no_new_privs less.
func TestExecNarrows(t *testing.T) {
	oom, umask := 200, uint32(0o77)
	e, err := parseExec(t, &specs.Process{
		Args: []string{"a"}, Cwd: "/", Terminal: true, OOMScoreAdj: &oom, ApparmorProfile: "sandbox", User: specs.User{Umask: &umask},
		Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_CHOWN"}},
		Rlimits:      []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1, Hard: 20}, {Type: "RLIMIT_CORE", Soft: 1, Hard: 1}},
	}, false)
	require.NoError(t, err)
	require.Nil(t, e.Terminal, "the request decides, and not the spec")
	require.Equal(t, wire.Capabilities{Bounding: 1 << unix.CAP_CHOWN}, e.Claim.Capabilities)
	require.Equal(t, []wire.Rlimit{{Resource: unix.RLIMIT_NOFILE, Soft: 1, Hard: 20}, {Resource: unix.RLIMIT_CORE, Soft: 1, Hard: 1}}, e.Claim.Rlimits)
	require.EqualValues(t, 200, *e.Claim.OOMScoreAdj)
	require.Equal(t, &umask, e.Claim.Umask)
	require.True(t, e.Claim.NoNewPrivs)
	require.Equal(t, within().Seccomp, e.Claim.Seccomp)
}

func TestExecRefuses(t *testing.T) {
	low := 99
	for name, change := range map[string]func(*specs.Process){
		"no command":             func(p *specs.Process) { p.Args = nil },
		"an empty command":       func(p *specs.Process) { p.Args = []string{""} },
		"no directory":           func(p *specs.Process) { p.Cwd = "" },
		"a relative directory":   func(p *specs.Process) { p.Cwd = "x" },
		"a zero byte":            func(p *specs.Process) { p.Args = []string{"a\x00"} },
		"a user that is none":    func(p *specs.Process) { p.User.UID = 1<<32 - 1 },
		"the name of a user":     func(p *specs.Process) { p.User.Username = "root" },
		"a label of SELinux":     func(p *specs.Process) { p.SelinuxLabel = "l" },
		"another profile":        func(p *specs.Process) { p.ApparmorProfile = "unconfined" },
		"a scheduler":            func(p *specs.Process) { p.Scheduler = &specs.Scheduler{} },
		"an I/O priority":        func(p *specs.Process) { p.IOPriority = &specs.LinuxIOPriority{} },
		"an unknown limit":       func(p *specs.Process) { p.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_NONE"}} },
		"a higher limit":         func(p *specs.Process) { p.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1, Hard: 21}} },
		"a soft limit above all": func(p *specs.Process) { p.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 21, Hard: 20}} },
		"a lower score":          func(p *specs.Process) { p.OOMScoreAdj = &low },
		"an unknown capability":  func(p *specs.Process) { p.Capabilities = &specs.LinuxCapabilities{Bounding: []string{"CAP_NONE"}} },
		"another capability":     func(p *specs.Process) { p.Capabilities = &specs.LinuxCapabilities{Ambient: []string{"CAP_SYS_ADMIN"}} },
		"a long environment":     func(p *specs.Process) { p.Env = []string{"A=" + strings.Repeat("x", wire.MaxMessage)} },
	} {
		t.Run(name, func(t *testing.T) {
			p := &specs.Process{Args: []string{"a"}, Cwd: "/"}
			change(p)
			_, err := parseExec(t, p, false)
			require.True(t, errdefs.IsInvalidArgument(err), "%v", err)
		})
	}
}

// FuzzParseExec parses whatever a client may send: what is accepted can be sent to sandbox-init, and has no more than the container.
func FuzzParseExec(f *testing.F) {
	raw, err := json.Marshal(&specs.Process{Args: []string{"a"}, Cwd: "/", Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_KILL"}}})
	require.NoError(f, err)
	f.Add(raw)
	f.Add([]byte(`{"args":["a"],"cwd":"/","rlimits":[{"type":"RLIMIT_NOFILE","soft":1,"hard":2}]}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		most := within()
		e, err := plan.ParseExec(raw, true, most)
		if err != nil {
			require.True(t, errdefs.IsInvalidArgument(err), "%v", err)
			return
		}
		_, err = wire.EncodeExec(e)
		require.NoError(t, err)
		caps := e.Claim.Capabilities
		require.Zero(t, (caps.Bounding|caps.Effective|caps.Permitted|caps.Inheritable|caps.Ambient)&^most.Capabilities.Bounding)
		require.True(t, e.Claim.NoNewPrivs)
		require.Equal(t, most.Seccomp, e.Claim.Seccomp)
		require.Equal(t, most.AppArmorProfile, e.Claim.AppArmorProfile)
		require.GreaterOrEqual(t, *e.Claim.OOMScoreAdj, *most.OOMScoreAdj)
		for _, l := range e.Claim.Rlimits {
			require.False(t, l.Resource == unix.RLIMIT_NOFILE && l.Hard > 20)
		}
	})
}
