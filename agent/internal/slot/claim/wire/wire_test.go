package wire_test

import (
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func full() *wire.Claim {
	oom, umask := int32(-998), uint32(0o27)
	return &wire.Claim{
		Args: []string{"sh", "", "-c"}, Env: []string{"A=1", "", "B=\xff"}, Cwd: "/work", UID: 1000, GID: 1001, Groups: []uint32{1001, 5},
		Hostname: "box", Capabilities: wire.Capabilities{Bounding: 1, Effective: 2, Permitted: 3, Inheritable: 4, Ambient: 1 << 63}, NoNewPrivs: true,
		Rlimits: []wire.Rlimit{{Resource: 7, Soft: 1, Hard: ^uint64(0)}}, Seccomp: make([]byte, 24), SeccompFlags: 4,
		AppArmorProfile: "cri-default", OOMScoreAdj: &oom, Umask: &umask,
		Mounts: []wire.Mount{
			{Destination: "/etc/hostname", Path: "/fsb/hostname", Attributes: wire.ReadOnly | wire.NoSUID | wire.NoDev | wire.NoExec},
			{Destination: "/data", FD: 3, Dir: true},
		},
	}
}

func TestClaimRoundTrip(t *testing.T) {
	for _, c := range []*wire.Claim{full(), {Args: []string{"x"}, Cwd: "/", Groups: []uint32{}}} {
		payload, err := wire.EncodeClaim(c)
		require.NoError(t, err)
		got, err := wire.DecodeClaim(string(payload))
		require.NoError(t, err)
		require.Equal(t, c, got)
	}
}

func TestAnyClaimRoundTrip(t *testing.T) {
	text := rapid.Map(rapid.String(), func(s string) string { return strings.ReplaceAll(s, "\x00", "") })
	path := rapid.Map(text, func(s string) string { return "/" + s[:min(len(s), 4000)] })
	id := rapid.Uint32Max(1<<31 - 1)
	rapid.Check(t, func(t *rapid.T) {
		c := &wire.Claim{
			Args: append([]string{"x"}, rapid.SliceOf(text).Draw(t, "args")...), Env: rapid.SliceOfN(text, 1, -1).Draw(t, "env"), Cwd: path.Draw(t, "cwd"),
			UID: id.Draw(t, "uid"), GID: id.Draw(t, "gid"), Groups: rapid.SliceOf(id).Draw(t, "groups"), NoNewPrivs: rapid.Bool().Draw(t, "nnp"),
			Capabilities: wire.Capabilities{Bounding: rapid.Uint64().Draw(t, "bounding"), Ambient: rapid.Uint64().Draw(t, "ambient")},
			Mounts:       []wire.Mount{{Destination: path.Draw(t, "destination"), FD: rapid.Uint32().Draw(t, "fd"), Attributes: rapid.Uint64().Draw(t, "attributes")}},
		}
		payload, err := wire.EncodeClaim(c)
		require.NoError(t, err)
		got, err := wire.DecodeClaim(string(payload))
		require.NoError(t, err)
		require.Equal(t, c, got)
	})
}

func TestInvalidClaims(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(c *wire.Claim)
		stage  wire.Stage
		errno  syscall.Errno
	}{
		{"no command", func(c *wire.Claim) { c.Args = nil }, wire.StageLookup, syscall.ENOENT},
		{"an empty command", func(c *wire.Claim) { c.Args[0] = "" }, wire.StageLookup, syscall.ENOENT},
		{"a zero byte in an argument", func(c *wire.Claim) { c.Args[2] = "a\x00b" }, wire.StageClaim, 0},
		{"a zero byte in a variable", func(c *wire.Claim) { c.Env[0] = "a\x00b" }, wire.StageClaim, 0},
		{"no working directory", func(c *wire.Claim) { c.Cwd = "" }, wire.StageCwd, syscall.EINVAL},
		{"a relative working directory", func(c *wire.Claim) { c.Cwd = "x" }, wire.StageCwd, syscall.EINVAL},
		{"a working directory that is too long", func(c *wire.Claim) { c.Cwd = "/" + strings.Repeat("x", 4096) }, wire.StageCwd, syscall.EINVAL},
		{"a user that setresuid ignores", func(c *wire.Claim) { c.UID = 1<<32 - 1 }, wire.StageUser, syscall.EINVAL},
		{"a group that setresgid ignores", func(c *wire.Claim) { c.GID = 1<<32 - 1 }, wire.StageUser, syscall.EINVAL},
		{"too many groups", func(c *wire.Claim) { c.Groups = make([]uint32, 1<<16+1) }, wire.StageUser, syscall.EINVAL},
		{"a host name that is too long", func(c *wire.Claim) { c.Hostname = strings.Repeat("x", 65) }, wire.StageHostname, syscall.EINVAL},
		{"too many limits", func(c *wire.Claim) { c.Rlimits = make([]wire.Rlimit, 17) }, wire.StageRlimit, syscall.EINVAL},
		{"a filter that is cut off", func(c *wire.Claim) { c.Seccomp = make([]byte, 7) }, wire.StageSeccomp, syscall.EINVAL},
		{"a filter that is too long", func(c *wire.Claim) { c.Seccomp = make([]byte, 4097*8) }, wire.StageSeccomp, syscall.EINVAL},
		{"a profile with a zero byte", func(c *wire.Claim) { c.AppArmorProfile = "a\x00" }, wire.StageAppArmor, syscall.EINVAL},
		{"an invalid umask", func(c *wire.Claim) { *c.Umask = 0o1000 }, wire.StageClaim, 0},
		{"too many mounts", func(c *wire.Claim) { c.Mounts = make([]wire.Mount, wire.MaxMounts+1) }, wire.StageMount, syscall.EINVAL},
		{"a relative mount", func(c *wire.Claim) { c.Mounts[0].Destination = "etc" }, wire.StageMount, syscall.EINVAL},
		{"a mount of a relative path", func(c *wire.Claim) { c.Mounts[0].Path = "etc" }, wire.StageMount, syscall.EINVAL},
		{"an environment that is too large", func(c *wire.Claim) { c.Env = append(c.Env, strings.Repeat("x", wire.MaxMessage)) }, wire.StageExec, syscall.E2BIG},
	} {
		t.Run(c.name, func(t *testing.T) {
			claim := full()
			c.change(claim)
			_, err := wire.EncodeClaim(claim)
			var f *wire.Failure
			require.ErrorAs(t, err, &f)
			require.Equal(t, c.stage, f.Stage)
			require.Equal(t, c.errno, f.Errno)
		})
	}
}

// TestVersions decodes messages of a later version.
func TestVersions(t *testing.T) {
	payload, err := wire.EncodeClaim(full())
	require.NoError(t, err)
	optional := append(payload[:len(payload):len(payload)], 0xff, 0x7f, 3, 0, 0, 0, 'n', 'e', 'w')
	got, err := wire.DecodeClaim(string(optional))
	require.NoError(t, err)
	require.Equal(t, full(), got)
	critical := append(payload[:len(payload):len(payload)], 0xff, 0xff, 3, 0, 0, 0, 'n', 'e', 'w')
	_, err = wire.DecodeClaim(string(critical))
	require.ErrorContains(t, err, "later version")

	hello := append(wire.EncodeHello(7), 0x10, 0, 1, 0, 0, 0, 'x')
	version, err := wire.DecodeHello(string(hello))
	require.NoError(t, err)
	require.EqualValues(t, 7, version)

	f, err := wire.DecodeFailure(string(append(wire.EncodeFailure(&wire.Failure{Stage: 200, Errno: 2, Detail: "x"}), 0x10, 0, 0, 0, 0, 0)))
	require.NoError(t, err)
	require.Equal(t, &wire.Failure{Stage: wire.StageUnknown, Errno: 2, Detail: "x"}, f)
}

// TestVersion1Bytes has the bytes of version 1: slots that were started before an upgrade use them.
func TestVersion1Bytes(t *testing.T) {
	require.Equal(t, "\x01\x00\x04\x00\x00\x00\x01\x00\x00\x00", string(wire.EncodeHello(1)))
	require.Equal(t, "\x05\x1a\x00\x00\x00"+"\x01\x00\x04\x00\x00\x00\x0d\x00\x00\x00"+"\x02\x00\x04\x00\x00\x00\x02\x00\x00\x00"+"\x03\x00\x00\x00\x00\x00",
		string(wire.Frame(wire.TypeFailure, wire.EncodeFailure(&wire.Failure{Stage: wire.StageLookup, Errno: syscall.ENOENT}))))
	payload, err := wire.EncodeClaim(&wire.Claim{Args: []string{"x"}, Cwd: "/", UID: 1, GID: 2, Groups: []uint32{3}})
	require.NoError(t, err)
	require.Equal(t, "\x01\x80\x01\x00\x00\x00x"+"\x03\x80\x01\x00\x00\x00/"+"\x04\x80\x04\x00\x00\x00\x01\x00\x00\x00"+"\x05\x80\x04\x00\x00\x00\x02\x00\x00\x00"+
		"\x06\x80\x04\x00\x00\x00\x03\x00\x00\x00"+"\x08\x80\x28\x00\x00\x00"+strings.Repeat("\x00", 40), string(payload))
}

func TestFailureText(t *testing.T) {
	f := &wire.Failure{Stage: wire.StageCwd, Errno: syscall.ENOTDIR, Detail: "/data"}
	require.EqualError(t, f, "sandbox-init: entering the working directory /data: not a directory")
	require.ErrorIs(t, f, syscall.ENOTDIR)
	require.EqualError(t, &wire.Failure{}, "sandbox-init: claiming the slot")
	require.NoError(t, (&wire.Failure{}).Unwrap())
	long, err := wire.DecodeFailure(string(wire.EncodeFailure(&wire.Failure{Detail: strings.Repeat("x", 5000)})))
	require.NoError(t, err)
	require.Len(t, long.Detail, 1024)
}

// TestLargeListsAreRefusedAtOnce: an empty mount has 6 bytes in a message and 48 in memory.
func TestLargeListsAreRefusedAtOnce(t *testing.T) {
	for name, field := range map[string]string{
		"mounts": "\x10\x80\x00\x00\x00\x00",
		"limits": "\x0a\x80\x14\x00\x00\x00" + strings.Repeat("\x00", 20),
	} {
		t.Run(name, func(t *testing.T) {
			payload := strings.Repeat(field, wire.MaxMessage/len(field))
			used := allocated(func() {
				_, err := wire.DecodeClaim(payload)
				require.ErrorIs(t, err, syscall.EINVAL)
			})
			require.Less(t, used, uint64(1<<20))
		})
	}
}

func TestSetupRoundTrip(t *testing.T) {
	want := &wire.Setup{
		Hostname: "slot", Loopback: true, Masked: []string{"/proc/kcore"}, Readonly: []string{"/proc/sys", "/proc/bus"},
		Mounts: []wire.SetupMount{
			{Destination: "/fsb", FD: 1}, {Destination: "/dev", Type: "tmpfs", Data: "mode=755", Flags: 1 << 40}, {Destination: "/proc", Type: "proc", Flags: 14},
		},
		Capabilities:  wire.Capabilities{Bounding: 1, Effective: 2, Permitted: 3, Inheritable: 4, Ambient: 5},
		UserNamespace: true, Rlimits: []wire.Rlimit{{Resource: 7, Soft: 1, Hard: 2}},
	}
	raw, err := wire.EncodeSetup(want)
	require.NoError(t, err)
	got, err := wire.DecodeSetup(string(raw))
	require.NoError(t, err)
	require.Equal(t, want, got)
	for cut := range raw {
		_, _ = wire.DecodeSetup(string(raw[:cut])) // it does not panic
	}
}

func TestInvalidSetups(t *testing.T) {
	for name, s := range map[string]*wire.Setup{
		"a long host name":         {Hostname: strings.Repeat("x", 65)},
		"a relative mount point":   {Mounts: []wire.SetupMount{{Destination: "proc"}}},
		"a zero byte in an option": {Mounts: []wire.SetupMount{{Destination: "/p", Data: "a\x00b"}}},
		"a relative path":          {Masked: []string{"proc"}},
		"too many limits":          {Rlimits: make([]wire.Rlimit, 17)},
		"too many mounts":          {Readonly: slices.Repeat([]string{"/a"}, wire.MaxMounts+1)},
	} {
		_, err := wire.EncodeSetup(s)
		require.Error(t, err, name)
	}
}

func fullExec() *wire.Exec {
	c := full()
	c.Mounts, c.Hostname = nil, ""
	return &wire.Exec{Claim: c, Terminal: &wire.Terminal{Rows: 24, Columns: 65535}}
}

func TestJoinRoundTrip(t *testing.T) {
	for _, j := range []*wire.Join{{Claim: fullExec().Claim}, {Claim: fullExec().Claim, Again: true}} {
		payload, err := wire.EncodeJoin(j)
		require.NoError(t, err)
		got, err := wire.DecodeJoin(string(payload))
		require.NoError(t, err)
		require.Equal(t, j, got)
	}
	for _, j := range []*wire.Join{{}, {Claim: full()}} {
		_, err := wire.EncodeJoin(j)
		require.Error(t, err)
	}
}

func TestExecRoundTrip(t *testing.T) {
	for _, e := range []*wire.Exec{fullExec(), {Claim: fullExec().Claim}, {Claim: fullExec().Claim, Terminal: &wire.Terminal{}}} {
		payload, err := wire.EncodeExec(e)
		require.NoError(t, err)
		got, err := wire.DecodeExec(string(payload))
		require.NoError(t, err)
		require.Equal(t, e, got)
		_, err = wire.DecodeExec(string(append(payload, payload...)))
		require.Error(t, err, "two processes")
	}
}

func TestInvalidExecs(t *testing.T) {
	for name, change := range map[string]func(*wire.Exec){
		"no process":  func(e *wire.Exec) { e.Claim = nil },
		"no command":  func(e *wire.Exec) { e.Claim.Args = nil },
		"a mount":     func(e *wire.Exec) { e.Claim.Mounts = full().Mounts },
		"a host name": func(e *wire.Exec) { e.Claim.Hostname = "box" },
		"too much": func(e *wire.Exec) {
			e.Claim.Env = []string{strings.Repeat("x", wire.MaxMessage-4096), strings.Repeat("x", 4090)}
		},
		"relative path": func(e *wire.Exec) { e.Claim.Cwd = "x" },
	} {
		e := fullExec()
		change(e)
		_, err := wire.EncodeExec(e)
		var failure *wire.Failure
		require.ErrorAs(t, err, &failure, name)
	}
}

func TestConfinementRoundTrip(t *testing.T) {
	want := full()
	got, err := wire.DecodeConfinement(string(wire.EncodeConfinement(want)))
	require.NoError(t, err)
	require.Equal(t, &wire.Claim{
		Capabilities: want.Capabilities, NoNewPrivs: true, Rlimits: want.Rlimits, Seccomp: want.Seccomp, SeccompFlags: want.SeccompFlags,
		AppArmorProfile: want.AppArmorProfile, OOMScoreAdj: want.OOMScoreAdj, Umask: want.Umask,
	}, got, "and nothing that is the process's own")
	_, err = wire.DecodeConfinement("\x0b\x80\x07\x00\x00\x001234567")
	require.Error(t, err, "a filter that is cut off")
}
