package seccomp_test

import (
	"encoding/json"
	"maps"
	"slices"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/seccomp"
)

// chooser draws values from fuzzed bytes. After their end it draws zeros.
type chooser []byte

func (c *chooser) next(n int) int {
	if len(*c) == 0 {
		return 0
	}
	b := (*c)[0]
	*c = (*c)[1:]
	return int(b) % n
}

// value draws a 64-bit number: often one at which conditions differ.
func (c *chooser) value() uint64 {
	edges := []uint64{0, 1, 2, 7, 0xff, 0xffffffff, 1 << 32, 1<<32 + 1, 1 << 63, ^uint64(0)}
	if i := c.next(len(edges) + 2); i < len(edges) {
		return edges[i]
	}
	var v uint64
	for range 8 {
		v = v<<8 | uint64(c.next(256))
	}
	return v
}

// profile draws a profile that runc would accept.
func (c *chooser) profile(names []string) *specs.LinuxSeccomp {
	actions := []specs.LinuxSeccompAction{specs.ActErrno, specs.ActAllow, specs.ActKill, specs.ActKillProcess, specs.ActTrap, specs.ActLog, specs.ActTrace, specs.ActKillThread}
	operators := []specs.LinuxSeccompOperator{specs.OpEqualTo, specs.OpNotEqual, specs.OpLessThan, specs.OpLessEqual, specs.OpGreaterThan, specs.OpGreaterEqual, specs.OpMaskedEqual}
	errno := func() *uint { return []*uint{nil, ptr(0), ptr(38), ptr(4095)}[c.next(4)] }
	p := &specs.LinuxSeccomp{DefaultAction: actions[c.next(len(actions))], DefaultErrnoRet: errno()}
	for range c.next(16) {
		s := specs.LinuxSyscall{Action: actions[c.next(len(actions))], ErrnoRet: errno()}
		for range 1 + c.next(8) {
			s.Names = append(s.Names, names[(c.next(256)<<8|c.next(256))%len(names)])
		}
		for range c.next(5) {
			s.Args = append(s.Args, specs.LinuxSeccompArg{Index: uint(c.next(6)), Op: operators[c.next(len(operators))], Value: c.value(), ValueTwo: c.value()})
		}
		p.Syscalls = append(p.Syscalls, s)
	}
	return p
}

// FuzzProfile compiles a drawn profile and runs the program on drawn system calls: it returns what the profile means, after few
// instructions, and it jumps forward within its bounds, as the kernel demands.
func FuzzProfile(f *testing.F) {
	f.Add([]byte{}, uint32(0))
	f.Add([]byte("\x00\x00\x03\x01\x00\x02\x00\x10\x00\x20\x02\x01\x00\x05\x01\x02\x06\x09\x08"), uint32(16))
	f.Add([]byte("\x01\x02\x0f\x00\x02\x07\x00\x01\x00\x02\x00\x03\x00\x04\x00\x05\x00\x06\x00\x07\x00\x08\x04\x00\x01\x09\x09\x00\x02\x08\x08"), uint32(0x40000001))
	for goarch, table := range tables {
		require.NotEmpty(f, table, goarch)
	}
	f.Fuzz(func(t *testing.T, raw []byte, number uint32) {
		for goarch, table := range tables {
			c := chooser(raw)
			p := c.profile(append(slices.Sorted(maps.Keys(table)), "no_such_call"))
			program, err := seccomp.CompileFor(goarch, p)
			require.NoError(t, err)
			require.LessOrEqual(t, len(program)/8, 4096, "the kernel's limit")
			numbers := []uint32{number, ^uint32(0), 0x40000000}
			for _, s := range p.Syscalls {
				for _, name := range s.Names {
					n := table[name]
					numbers = append(numbers, n, n+1, n|0x40000000)
				}
			}
			m := machine(program)
			for range 4 {
				args := [6]uint64{c.value(), c.value(), c.value(), c.value(), c.value(), c.value()}
				for _, v := range interesting(p) {
					args[c.next(6)] = v
					for _, n := range numbers {
						got, steps := m.run(audit[goarch], n, args)
						if want := naive(t, goarch, p, n, args); got != want {
							t.Fatalf("%s: call %d with %#x: got %#x, want %#x", goarch, n, args, got, want)
						}
						require.LessOrEqual(t, steps, 32+7*conditions(p, table, n))
					}
				}
			}
			got, _ := m.run(unix.AUDIT_ARCH_I386, number, [6]uint64{})
			require.Equal(t, uint32(unix.SECCOMP_RET_KILL_THREAD), got, "another architecture")
		}
	})
}

// conditions returns what a profile has to say about a call: each rule that names it, and each condition of such a rule, as often as it does.
func conditions(p *specs.LinuxSeccomp, table map[string]uint32, number uint32) (count int) {
	for _, s := range p.Syscalls {
		for _, name := range s.Names {
			if n, ok := table[name]; ok && n == number {
				count += 1 + len(s.Args)
			}
		}
	}
	return count
}

// FuzzProfileJSON compiles what an OCI spec may contain. A profile is refused, or its program is one that the kernel accepts.
func FuzzProfileJSON(f *testing.F) {
	for _, goarch := range []string{"amd64", "arm64"} {
		raw, err := json.Marshal(defaultProfile(goarch))
		require.NoError(f, err)
		f.Add(raw)
	}
	f.Add([]byte(`{"defaultAction":"SCMP_ACT_ERRNO","defaultErrnoRet":70000,"syscalls":[{"names":["read","mount"],"action":"SCMP_ACT_ALLOW","args":[{"index":5,"value":1,"op":"SCMP_CMP_NE"}]}]}`))
	f.Add([]byte(`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["clone"],"action":"SCMP_ACT_NOTIFY"}]}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var p specs.LinuxSeccomp
		if json.Unmarshal(raw, &p) != nil {
			return
		}
		for goarch := range tables {
			program, err := seccomp.CompileFor(goarch, &p)
			if err != nil {
				require.Nil(t, program)
				continue
			}
			verify(t, program)
		}
	})
}

// verify makes the checks of the kernel's seccomp_check_filter and bpf_check_classic.
func verify(t *testing.T, program []byte) {
	t.Helper()
	require.NotEmpty(t, program)
	require.Zero(t, len(program)%8)
	n := len(program) / 8
	for at := range n {
		i := instructionAt(program, at)
		switch i.Code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			require.True(t, i.K%4 == 0 && i.K < 64, "a load outside of struct seccomp_data")
		case unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, unix.BPF_RET | unix.BPF_K:
		case unix.BPF_JMP | unix.BPF_JA:
			require.Less(t, uint64(at)+1+uint64(i.K), uint64(n))
		default:
			require.Equal(t, unix.BPF_JMP, int(i.Code&7))
			require.Less(t, at+1+int(max(i.Jt, i.Jf)), n)
		}
	}
	require.EqualValues(t, unix.BPF_RET|unix.BPF_K, instructionAt(program, n-1).Code)
}
