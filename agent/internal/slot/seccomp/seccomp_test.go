package seccomp_test

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"runtime"
	"strconv"
	"testing"

	containerd "github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/seccomp"
)

var native = map[string]specs.Arch{"amd64": specs.ArchX86_64, "arm64": specs.ArchAARCH64}

var audit = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

// tables are read many times.
var tables = map[string]map[string]uint32{"amd64": seccomp.Numbers("amd64"), "arm64": seccomp.Numbers("arm64")}

func defaultProfile(goarch string) *specs.LinuxSeccomp {
	caps := []string{"CAP_SYS_CHROOT", "CAP_MKNOD", "CAP_SETUID"}
	p := containerd.DefaultProfile(&specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: caps}}})
	p.Architectures = []specs.Arch{native[goarch]}
	return p
}

func profile(fallback specs.LinuxSeccompAction, rules ...specs.LinuxSyscall) *specs.LinuxSeccomp {
	return &specs.LinuxSeccomp{DefaultAction: fallback, Syscalls: rules}
}

func rule(action specs.LinuxSeccompAction, name string, args ...specs.LinuxSeccompArg) specs.LinuxSyscall {
	return specs.LinuxSyscall{Names: []string{name}, Action: action, Args: args}
}

// machine runs a program as the kernel does.
type machine []byte

// instructionAt decodes an instruction of a program.
func instructionAt(program []byte, at int) unix.SockFilter {
	p := program[8*at:]
	return unix.SockFilter{Code: binary.NativeEndian.Uint16(p), Jt: p[2], Jf: p[3], K: binary.NativeEndian.Uint32(p[4:])}
}

// run returns what the program returns, and how many instructions it executed.
func (m machine) run(arch, number uint32, args [6]uint64) (result uint32, steps int) {
	data := binary.NativeEndian.AppendUint32(nil, number)
	data = binary.NativeEndian.AppendUint32(data, arch)
	data = binary.NativeEndian.AppendUint64(data, 0xdeadbeef) // the instruction pointer
	for _, a := range args {
		data = binary.NativeEndian.AppendUint64(data, a)
	}
	var accumulator uint32
	for at := 0; ; at++ {
		steps++
		i := instructionAt(m, at)
		code, yes, no, k := int(i.Code), int(i.Jt), int(i.Jf), i.K
		holds := false
		switch code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			accumulator = binary.NativeEndian.Uint32(data[k:])
			continue
		case unix.BPF_ALU | unix.BPF_AND | unix.BPF_K:
			accumulator &= k
			continue
		case unix.BPF_RET | unix.BPF_K:
			return k, steps
		case unix.BPF_JMP | unix.BPF_JA:
			at += int(k)
			continue
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K:
			holds = accumulator == k
		case unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K:
			holds = accumulator > k
		case unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K:
			holds = accumulator&k != 0
		case unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K:
			holds = accumulator >= k
		default:
			panic("an instruction that no program needs: " + strconv.Itoa(code))
		}
		if holds {
			at += yes
		} else {
			at += no
		}
	}
}

// naive evaluates the profile rule by rule.
func naive(t require.TestingT, goarch string, p *specs.LinuxSeccomp, number uint32, args [6]uint64) uint32 {
	table := tables[goarch]
	value := func(a specs.LinuxSeccompAction, errno *uint) uint32 {
		data := uint32(unix.EPERM)
		if errno != nil {
			data = uint32(*errno)
		}
		return map[specs.LinuxSeccompAction]uint32{
			specs.ActKill: 0, specs.ActKillThread: 0, specs.ActKillProcess: 0x80000000, specs.ActTrap: 0x30000, specs.ActErrno: 0x50000 | data,
			specs.ActTrace: 0x7ff00000 | data, specs.ActLog: 0x7ffc0000, specs.ActAllow: 0x7fff0000,
		}[a]
	}
	last, fallback := uint32(0), value(p.DefaultAction, p.DefaultErrnoRet)
	for _, s := range p.Syscalls {
		for _, name := range s.Names {
			last = max(last, table[name])
		}
	}
	allows := p.DefaultAction == specs.ActAllow || p.DefaultAction == specs.ActLog || p.DefaultAction == specs.ActTrace
	x32 := goarch == "amd64" && number&0x40000000 != 0
	switch {
	case !x32 && last > 0 && number > last && !allows && fallback != 0x50000|uint32(unix.ENOSYS):
		return 0x50000 | uint32(unix.ENOSYS)
	case goarch == "amd64" && number >= 0x40000000 && number != math.MaxUint32:
		return 0
	}
	var conditional []uint32
	for _, s := range p.Syscalls {
		for _, name := range s.Names {
			if n, ok := table[name]; !ok || n != number || value(s.Action, s.ErrnoRet) == fallback {
				continue
			}
			if len(s.Args) == 0 {
				return value(s.Action, s.ErrnoRet)
			}
			if holds(t, s.Args, args) {
				conditional = append(conditional, value(s.Action, s.ErrnoRet))
			}
		}
	}
	if len(conditional) > 0 {
		return conditional[0]
	}
	return fallback
}

func holds(t require.TestingT, conditions []specs.LinuxSeccompArg, args [6]uint64) bool {
	seen, repeated := map[uint]bool{}, false
	all, some := true, false
	for _, c := range conditions {
		repeated = repeated || seen[c.Index]
		seen[c.Index] = true
		a := args[c.Index]
		var ok bool
		switch c.Op {
		case specs.OpEqualTo:
			ok = a == c.Value
		case specs.OpNotEqual:
			ok = a != c.Value
		case specs.OpLessThan:
			ok = a < c.Value
		case specs.OpLessEqual:
			ok = a <= c.Value
		case specs.OpGreaterThan:
			ok = a > c.Value
		case specs.OpGreaterEqual:
			ok = a >= c.Value
		case specs.OpMaskedEqual:
			ok = a&c.Value == c.ValueTwo
		default:
			require.Fail(t, "unknown operator")
		}
		all, some = all && ok, some || ok
	}
	if repeated {
		return some
	}
	return all
}

// interesting returns values at which a condition of the profile may change its result.
func interesting(p *specs.LinuxSeccomp) []uint64 {
	seen := map[uint64]bool{0: true, math.MaxUint64: true}
	for _, s := range p.Syscalls {
		for _, a := range s.Args {
			for _, v := range []uint64{a.Value, a.Value - 1, a.Value + 1, a.Value | 1<<32, a.Value &^ 1, a.Value << 32, a.ValueTwo} {
				seen[v] = true
			}
		}
	}
	var list []uint64
	for v := range seen {
		list = append(list, v)
	}
	return list
}

func TestDefaultProfile(t *testing.T) {
	for goarch := range native {
		t.Run(goarch, func(t *testing.T) {
			p := defaultProfile(goarch)
			program, err := seccomp.CompileFor(goarch, p)
			require.NoError(t, err)
			t.Logf("%d instructions", len(program)/8)
			m := machine(program)
			conditional := map[uint32]bool{}
			for _, s := range p.Syscalls {
				for _, name := range s.Names {
					if len(s.Args) > 0 {
						conditional[tables[goarch][name]] = true
					}
				}
			}
			values := interesting(p)
			numbers := []uint32{math.MaxUint32, 0x80000000, 0xc0000001, 0x40000000, 0x40000000 + 39, 0x3fffffff, 5000}
			for n := range uint32(1024) {
				numbers = append(numbers, n)
			}
			for _, n := range numbers {
				tried := []uint64{0, math.MaxUint64}
				if conditional[n] {
					tried = values
				}
				for _, v := range tried {
					args := [6]uint64{v, v, v, v, v, v}
					got, _ := m.run(audit[goarch], n, args)
					if want := naive(t, goarch, p, n, args); got != want {
						t.Fatalf("call %d, argument %#x: got %#x, want %#x", n, v, got, want)
					}
				}
			}
			got, _ := m.run(unix.AUDIT_ARCH_I386, 20, [6]uint64{})
			require.Equal(t, uint32(unix.SECCOMP_RET_KILL_THREAD), got, "another architecture")
		})
	}
}

// TestProfiles compares with the naive evaluation, over random profiles.
func TestProfiles(t *testing.T) {
	actions := []specs.LinuxSeccompAction{specs.ActAllow, specs.ActErrno, specs.ActKill, specs.ActKillProcess, specs.ActTrap, specs.ActLog, specs.ActTrace}
	operators := []specs.LinuxSeccompOperator{specs.OpEqualTo, specs.OpNotEqual, specs.OpLessThan, specs.OpLessEqual, specs.OpGreaterThan, specs.OpGreaterEqual, specs.OpMaskedEqual}
	number := rapid.SampledFrom([]uint64{0, 1, 2, 7, 0xffffffff, 1 << 32, 1<<32 + 1, 1<<63 + 7, math.MaxUint64})
	for goarch := range native {
		var names []string
		for name := range tables[goarch] {
			names = append(names, name)
		}
		names = append(names, "no_such_call")
		rapid.Check(t, func(t *rapid.T) {
			errno := rapid.SampledFrom([]*uint{nil, new(uint), ptr(38)})
			arg := rapid.Custom(func(t *rapid.T) specs.LinuxSeccompArg {
				return specs.LinuxSeccompArg{Index: rapid.UintMax(5).Draw(t, "index"), Op: rapid.SampledFrom(operators).Draw(t, "op"), Value: number.Draw(t, "value"), ValueTwo: number.Draw(t, "two")}
			})
			rules := rapid.Custom(func(t *rapid.T) specs.LinuxSyscall {
				return specs.LinuxSyscall{
					Names:  rapid.SliceOfN(rapid.SampledFrom(names), 1, 20).Draw(t, "names"),
					Action: rapid.SampledFrom(actions).Draw(t, "action"), ErrnoRet: errno.Draw(t, "errno"), Args: rapid.SliceOfN(arg, 0, 4).Draw(t, "args"),
				}
			})
			p := &specs.LinuxSeccomp{
				DefaultAction: rapid.SampledFrom(actions).Draw(t, "default"), DefaultErrnoRet: errno.Draw(t, "default errno"),
				Syscalls: rapid.SliceOfN(rules, 0, 12).Draw(t, "rules"),
			}
			program, err := seccomp.CompileFor(goarch, p)
			require.NoError(t, err)
			m := machine(program)
			for _, s := range p.Syscalls {
				var tried [4][6]uint64
				for i := range tried {
					for j := range tried[i] {
						tried[i][j] = number.Draw(t, "argument")
					}
				}
				for _, name := range s.Names {
					n := tables[goarch][name]
					for _, args := range tried {
						for _, n := range []uint32{n, n + 1, n | 0x40000000, n | 0x80000000, math.MaxUint32} {
							got, _ := m.run(audit[goarch], n, args)
							require.Equal(t, naive(t, goarch, p, n, args), got, "call %d", n)
						}
					}
				}
			}
		})
	}
}

func ptr(v uint) *uint { return &v }

func TestInvalidProfiles(t *testing.T) {
	for _, c := range []struct {
		name    string
		goarch  string
		profile *specs.LinuxSeccomp
		is      func(error) bool
	}{
		{"an unknown architecture", "s390x", profile(specs.ActAllow), errdefs.IsNotImplemented},
		{"an architecture beside the native one", "amd64", &specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Architectures: []specs.Arch{specs.ArchX86_64, specs.ArchX86}}, errdefs.IsNotImplemented},
		{"notifications", "amd64", profile(specs.ActErrno, rule(specs.ActNotify, "mount")), errdefs.IsNotImplemented},
		{"an invalid action", "amd64", profile("SCMP_ACT_MAYBE"), errdefs.IsInvalidArgument},
		{"an invalid operator", "amd64", profile(specs.ActErrno, rule(specs.ActAllow, "mount", specs.LinuxSeccompArg{Op: "SCMP_CMP_LIKE"})), errdefs.IsInvalidArgument},
		{"a seventh argument", "amd64", profile(specs.ActErrno, rule(specs.ActAllow, "mount", specs.LinuxSeccompArg{Index: 6, Op: specs.OpEqualTo})), errdefs.IsInvalidArgument},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := seccomp.CompileFor(c.goarch, c.profile)
			require.True(t, c.is(err), "%v", err)
		})
	}
	program, err := seccomp.Compile(nil)
	require.NoError(t, err)
	require.Empty(t, program)
}

// TestProgramIsShallow bounds the number of instructions that a system call executes.
func TestProgramIsShallow(t *testing.T) {
	// Every other number has its own rule, which is the worst case.
	var rules []specs.LinuxSyscall
	for name, n := range tables[runtime.GOARCH] {
		errno := uint(1 + rand.IntN(3))
		if n%2 == 0 {
			rules = append(rules, specs.LinuxSyscall{Names: []string{name}, Action: specs.ActErrno, ErrnoRet: &errno})
		}
	}
	program, err := seccomp.Compile(profile(specs.ActAllow, rules...))
	require.NoError(t, err)
	for n := range uint32(500) {
		_, steps := machine(program).run(audit[runtime.GOARCH], n, [6]uint64{})
		require.LessOrEqual(t, steps, 20, "call %d", n)
	}
}
