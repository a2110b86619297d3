// Package seccomp compiles the OCI runtime specification's seccomp profiles to the BPF programs that the kernel loads, for
// processes that confine themselves without an OCI runtime. It is pure computation, keeps no state, and may be called
// concurrently. It interprets a profile as runc with libseccomp does:
//
//   - a system call of another architecture kills the thread;
//   - a number above all those that the profile names is ENOSYS, as on a kernel that is older than it, unless the profile
//     allows by default;
//   - on amd64, a number of the x32 ABI kills the thread;
//   - a name that the architecture does not have is skipped, and so is a rule whose action is the default one;
//   - the conditions of one rule must all hold, but if several are on one argument each counts as a rule of its own;
//   - a system call's rules are alternatives, of which an unconditional one takes precedence.
//
// The numbers are those of golang.org/x/sys. They may be newer than those of the host's libseccomp, which skips the names
// that it does not know.
package seccomp

import (
	"fmt"
	"maps"
	"runtime"
	"slices"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// x32Bit marks the numbers of the x32 ABI, which has amd64's architecture.
const x32Bit = 0x40000000

type arch struct {
	oci   specs.Arch
	audit uint32
	table func() map[string]uint32
	x32   bool
}

func archOf(goarch string) (arch, error) {
	switch goarch {
	case "amd64":
		return arch{specs.ArchX86_64, unix.AUDIT_ARCH_X86_64, numbersAMD64, true}, nil
	case "arm64":
		return arch{specs.ArchAARCH64, unix.AUDIT_ARCH_AARCH64, numbersARM64, false}, nil
	}
	return arch{}, fmt.Errorf("compiling a seccomp profile for %s: %w", goarch, errdefs.ErrNotImplemented)
}

// Compile calls CompileFor for this machine's architecture.
func Compile(profile *specs.LinuxSeccomp) ([]byte, error) { return CompileFor(runtime.GOARCH, profile) }

// CompileFor returns the program, an array of struct sock_filter, for amd64 or arm64. A nil profile gives no program. What
// this package does not support is errdefs.ErrNotImplemented: further architectures, and notifications. An invalid profile is
// errdefs.ErrInvalidArgument.
func CompileFor(goarch string, profile *specs.LinuxSeccomp) ([]byte, error) {
	if profile == nil {
		return nil, nil
	}
	a, err := archOf(goarch)
	if err != nil {
		return nil, err
	}
	for _, other := range profile.Architectures {
		if other != a.oci {
			return nil, fmt.Errorf("compiling a seccomp profile for %s beside %s: %w", other, a.oci, errdefs.ErrNotImplemented)
		}
	}
	fallback, err := action(profile.DefaultAction, profile.DefaultErrnoRet)
	if err != nil {
		return nil, err
	}
	calls, last, err := collect(profile, a.table(), fallback)
	if err != nil {
		return nil, err
	}
	p := program(a, fallback, calls, limit(profile, fallback, last))
	if len(p) > unix.BPF_MAXINSNS {
		return nil, fmt.Errorf("compiling a seccomp profile: %d instructions: %w", len(p), errdefs.ErrInvalidArgument)
	}
	return encode(p), nil
}

// limit returns the number above which the profile knows no system call; 0 if it has no such limit.
func limit(profile *specs.LinuxSeccomp, fallback, last uint32) uint32 {
	permissive := profile.DefaultAction == specs.ActAllow || profile.DefaultAction == specs.ActLog || profile.DefaultAction == specs.ActTrace
	if permissive || fallback == unix.SECCOMP_RET_ERRNO|uint32(unix.ENOSYS) {
		return 0
	}
	return last
}

// rule is an action under conditions, all of which must hold.
type rule struct {
	conditions []specs.LinuxSeccompArg
	action     uint32
}

// call is a system call with its rules, of which the first that holds applies.
type call struct {
	number uint32
	rules  []rule
}

// collect sorts the profile's rules by system call, and returns the largest number that has any.
func collect(profile *specs.LinuxSeccomp, table map[string]uint32, fallback uint32) ([]call, uint32, error) {
	rules := map[uint32][]rule{}
	var last uint32
	for _, s := range profile.Syscalls {
		act, err := action(s.Action, s.ErrnoRet)
		if err != nil {
			return nil, 0, err
		}
		alternatives, err := alternatives(s.Args, act)
		if err != nil {
			return nil, 0, err
		}
		for _, name := range s.Names {
			number, ok := table[name]
			if !ok {
				continue
			}
			last = max(last, number)
			if act != fallback {
				rules[number] = append(rules[number], alternatives...)
			}
		}
	}
	calls := make([]call, 0, len(rules))
	for _, number := range slices.Sorted(maps.Keys(rules)) {
		c := call{number: number, rules: rules[number]}
		if i := slices.IndexFunc(c.rules, func(r rule) bool { return len(r.conditions) == 0 }); i >= 0 {
			c.rules = c.rules[i : i+1]
		}
		calls = append(calls, c)
	}
	return calls, last, nil
}

// alternatives returns the rules that one rule of the profile expands to.
func alternatives(args []specs.LinuxSeccompArg, act uint32) ([]rule, error) {
	var used [6]int
	repeated := false
	for _, a := range args {
		if a.Index > 5 {
			return nil, fmt.Errorf("compiling a seccomp profile: argument %d: %w", a.Index, errdefs.ErrInvalidArgument)
		}
		switch a.Op {
		case specs.OpNotEqual, specs.OpLessThan, specs.OpLessEqual, specs.OpEqualTo, specs.OpGreaterEqual, specs.OpGreaterThan, specs.OpMaskedEqual:
		default:
			return nil, fmt.Errorf("compiling a seccomp profile: operator %q: %w", a.Op, errdefs.ErrInvalidArgument)
		}
		used[a.Index]++
		repeated = repeated || used[a.Index] > 1
	}
	if !repeated {
		return []rule{{args, act}}, nil
	}
	var each []rule
	for _, a := range args {
		each = append(each, rule{[]specs.LinuxSeccompArg{a}, act})
	}
	return each, nil
}

// action returns the value that a filter returns to the kernel.
func action(a specs.LinuxSeccompAction, errno *uint) (uint32, error) {
	data := uint32(unix.EPERM)
	if errno != nil {
		data = uint32(*errno) & unix.SECCOMP_RET_DATA
	}
	switch a {
	case specs.ActKill, specs.ActKillThread:
		return unix.SECCOMP_RET_KILL_THREAD, nil
	case specs.ActKillProcess:
		return unix.SECCOMP_RET_KILL_PROCESS, nil
	case specs.ActTrap:
		return unix.SECCOMP_RET_TRAP, nil
	case specs.ActErrno:
		return unix.SECCOMP_RET_ERRNO | data, nil
	case specs.ActTrace:
		return unix.SECCOMP_RET_TRACE | data, nil
	case specs.ActLog:
		return unix.SECCOMP_RET_LOG, nil
	case specs.ActAllow:
		return unix.SECCOMP_RET_ALLOW, nil
	case specs.ActNotify:
		return 0, fmt.Errorf("compiling a seccomp profile: notifications: %w", errdefs.ErrNotImplemented)
	}
	return 0, fmt.Errorf("compiling a seccomp profile: action %q: %w", a, errdefs.ErrInvalidArgument)
}
