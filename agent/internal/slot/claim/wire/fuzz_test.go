package wire_test

import (
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// allocated returns how many bytes do allocates.
func allocated(do func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	do()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// FuzzClaim decodes arbitrary bytes. What the decoder accepts encodes to the same claim, and is within the limits of the protocol.
// A decoder allocates at most a multiple of what it was sent.
func FuzzClaim(f *testing.F) {
	payload, err := wire.EncodeClaim(full())
	require.NoError(f, err)
	for _, seed := range []string{
		string(payload), string(payload[:len(payload)-1]), string(payload[1:]), "\x01\x80\xff\xff\xff\xff", "\x10\x80\x06\x00\x00\x00\x01\x80\xff\xff\xff\xff",
		strings.Repeat("\x10\x80\x00\x00\x00\x00", 20_000), strings.Repeat("\x0a\x80\x14\x00\x00\x00"+strings.Repeat("\x00", 20), 2000),
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, payload string) {
		var c *wire.Claim
		var err error
		used := allocated(func() { c, err = wire.DecodeClaim(payload) })
		require.LessOrEqual(t, used, uint64(24*len(payload)+64<<10))
		if err != nil {
			var failure *wire.Failure
			require.ErrorAs(t, err, &failure)
			return
		}
		require.LessOrEqual(t, len(c.Mounts), wire.MaxMounts)
		require.NotContains(t, strings.Join(append(c.Args, c.Env...), ""), "\x00")
		require.NotEqual(t, ^uint32(0), c.UID, "setresuid(2) ignores it, which leaves root")
		require.NotEqual(t, ^uint32(0), c.GID)
		require.NotContains(t, c.Groups, ^uint32(0))
		again, err := wire.EncodeClaim(c)
		require.NoError(t, err)
		twice, err := wire.DecodeClaim(string(again))
		require.NoError(t, err)
		if len(c.Seccomp) == 0 {
			c.SeccompFlags, c.Seccomp = 0, nil // ignored without a filter
		}
		if c.Groups == nil {
			c.Groups = []uint32{}
		}
		for i := range c.Mounts {
			if c.Mounts[i].Path != "" {
				c.Mounts[i].FD = 0 // the path takes precedence
			}
		}
		require.Equal(t, c, twice)
	})
}

// FuzzReply decodes what a slot, which may be hostile, sends to the agent: a frame's header, a greeting and a failure.
func FuzzReply(f *testing.F) {
	f.Add(string(wire.EncodeHello(1)))
	f.Add(string(wire.EncodeFailure(&wire.Failure{Stage: wire.StageExec, Errno: syscall.ENOENT, Detail: "x"})))
	f.Add(string(wire.Frame(wire.TypeFailure, wire.EncodeFailure(&wire.Failure{Stage: wire.StageLookup}))))
	f.Add(strings.Repeat("\x03\x00\x00\x00\x00\x00", 1000))
	f.Fuzz(func(t *testing.T, payload string) {
		used := allocated(func() {
			if version, err := wire.DecodeHello(payload); err == nil {
				require.NotZero(t, version)
			}
			if failure, err := wire.DecodeFailure(payload); err == nil {
				require.NotEmpty(t, failure.Error())
				require.LessOrEqual(t, len(failure.Detail), 1024)
				require.Less(t, failure.Errno, syscall.Errno(4096))
				twice, err := wire.DecodeFailure(string(wire.EncodeFailure(failure)))
				require.NoError(t, err)
				require.Equal(t, failure, twice)
			}
		})
		require.LessOrEqual(t, used, uint64(len(payload)+64<<10))
		if len(payload) < wire.HeaderSize {
			return
		}
		header := [wire.HeaderSize]byte([]byte(payload))
		if kind, n, err := wire.ParseHeader(header); err == nil {
			require.LessOrEqual(t, n, wire.MaxMessage)
			require.Equal(t, header[:], wire.AppendHeader(nil, kind, n))
		}
	})
}

// FuzzSetup decodes whatever a shim may send: what is accepted can be encoded again, and is the same then.
func FuzzSetup(f *testing.F) {
	raw, err := wire.EncodeSetup(&wire.Setup{
		Hostname: "slot", Mounts: []wire.SetupMount{{Destination: "/dev", Type: "tmpfs", Data: "mode=755", Flags: 3}}, Masked: []string{"/a"},
	})
	require.NoError(f, err)
	f.Add(string(raw))
	f.Fuzz(func(t *testing.T, payload string) {
		s, err := wire.DecodeSetup(payload)
		if err != nil {
			return
		}
		raw, err := wire.EncodeSetup(s)
		require.NoError(t, err)
		again, err := wire.DecodeSetup(string(raw))
		require.NoError(t, err)
		require.Equal(t, s, again)
	})
}

// FuzzExec decodes whatever a shim may send, and what sandbox-init sends to it: what is accepted can be encoded again, and is the same then.
func FuzzExec(f *testing.F) {
	raw, err := wire.EncodeExec(fullExec())
	require.NoError(f, err)
	f.Add(string(raw))
	f.Add(string(wire.EncodeConfinement(full())))
	f.Add(strings.Repeat("\x0a\x80\x14\x00\x00\x00"+strings.Repeat("\x00", 20), 2000))
	f.Fuzz(func(t *testing.T, payload string) {
		used := allocated(func() {
			_, _ = wire.DecodeExec(payload)
			_, _ = wire.DecodeConfinement(payload)
		})
		require.LessOrEqual(t, used, uint64(48*len(payload)+128<<10))
		if e, err := wire.DecodeExec(payload); err == nil {
			require.Empty(t, e.Claim.Mounts)
			raw, err := wire.EncodeExec(e)
			require.NoError(t, err)
			again, err := wire.DecodeExec(string(raw))
			require.NoError(t, err)
			twice, err := wire.EncodeExec(again)
			require.NoError(t, err)
			require.Equal(t, raw, twice)
		}
		if c, err := wire.DecodeConfinement(payload); err == nil {
			again, err := wire.DecodeConfinement(string(wire.EncodeConfinement(c)))
			require.NoError(t, err)
			require.Equal(t, c.Capabilities, again.Capabilities)
			require.Equal(t, c.NoNewPrivs, again.NoNewPrivs)
			require.Equal(t, len(c.Seccomp), len(again.Seccomp))
		}
	})
}

// FuzzJoin decodes what an agent may send to a supervisor that joins: what is accepted can be encoded again, and is the same then.
func FuzzJoin(f *testing.F) {
	raw, err := wire.EncodeJoin(&wire.Join{Claim: fullExec().Claim, Again: true})
	require.NoError(f, err)
	f.Add(string(raw))
	f.Add(string(raw) + string(raw))
	f.Fuzz(func(t *testing.T, payload string) {
		used := allocated(func() { _, _ = wire.DecodeJoin(payload) })
		require.LessOrEqual(t, used, uint64(48*len(payload)+128<<10))
		j, err := wire.DecodeJoin(payload)
		if err != nil {
			var failure *wire.Failure
			require.ErrorAs(t, err, &failure)
			return
		}
		require.Empty(t, j.Claim.Mounts)
		raw, err := wire.EncodeJoin(j)
		require.NoError(t, err)
		again, err := wire.DecodeJoin(string(raw))
		require.NoError(t, err)
		require.Equal(t, j.Again, again.Again)
	})
}

// FuzzProcess decodes what an agent and the supervisor of a sandbox, which may be hostile, send each other about processes.
func FuzzProcess(f *testing.F) {
	start, err := wire.EncodeStart(&wire.Start{
		Args: []string{"sh", "-c", "x"}, Env: []string{"A=1"}, Cwd: "/", User: "1:2", Tag: "t", Input: true, Terminal: &wire.Terminal{Rows: 1, Columns: 2}, Timeout: 5, Buffer: 4096, Kill: true,
	})
	require.NoError(f, err)
	f.Add(string(start))
	f.Add(string(wire.EncodeFollow(&wire.Follow{Target: wire.Target{Pid: 1, Tag: "t"}, From: 7, Lossy: true})))
	f.Add(string(wire.EncodeRequest(&wire.Request{Target: wire.Target{Pid: 1}, Signal: 9, Group: true, Data: "x", Terminal: wire.Terminal{Rows: 3, Columns: 4}})))
	f.Add(string(wire.EncodeProcesses(&wire.Process{Pid: 1, Args: []string{"a", "b"}, Exit: &wire.Exit{Code: 137, Signal: 9, At: 1}}, &wire.Process{Tag: "t"})))
	f.Add(string(wire.AppendOutput(nil, wire.Stderr, 5, 1)) + "x")
	f.Fuzz(func(t *testing.T, payload string) {
		used := allocated(func() {
			if s, err := wire.DecodeStart(payload); err == nil {
				require.NotContains(t, strings.Join(append(s.Args, s.Env...), ""), "\x00")
				again, err := wire.EncodeStart(s)
				require.NoError(t, err)
				twice, err := wire.DecodeStart(string(again))
				require.NoError(t, err)
				require.Equal(t, s, twice)
			}
			_, _ = wire.DecodeFollow(payload)
			_, _ = wire.DecodeRequest(payload)
			_, _ = wire.DecodeProcesses(payload)
			_, _ = wire.DecodeExit(payload)
			if stream, _, _, err := wire.DecodeOutput(payload); err == nil {
				require.Contains(t, []wire.Stream{wire.Stdout, wire.Stderr, wire.Console}, stream)
			}
		})
		require.LessOrEqual(t, used, uint64(400*len(payload)+256<<10))
	})
}
