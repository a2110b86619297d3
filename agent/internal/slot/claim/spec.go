package claim

import (
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// FromSpec returns the claim that turns a slot into what runc makes of the spec's process: the same command line,
// environment, user, capabilities and limits. The environment is the one that runc passes on: of a name that occurs twice the
// last value, and HOME=/ if there is none.
//
// The caller fills in Seccomp (see package seccomp; a profile should be compiled once) and Mounts. Namespaces, cgroup, masked
// paths and the rest of the spec are the slot's. The error is errdefs.ErrInvalidArgument for an unknown name, and
// errdefs.ErrNotImplemented for a terminal.
func FromSpec(s *specs.Spec) (*Claim, error) {
	p := s.Process
	if p == nil {
		return nil, fmt.Errorf("claiming for a spec without a process: %w", errdefs.ErrInvalidArgument)
	}
	if p.Terminal {
		return nil, fmt.Errorf("claiming with a terminal: %w", errdefs.ErrNotImplemented)
	}
	c := &Claim{
		Args: slices.Clone(p.Args), KeepAlive: len(p.Args) == 0, Env: environment(p.Env), Cwd: p.Cwd,
		UID: p.User.UID, GID: p.User.GID, Groups: slices.Clone(p.User.AdditionalGids),
		Hostname: s.Hostname, NoNewPrivs: p.NoNewPrivileges, AppArmorProfile: p.ApparmorProfile, Umask: p.User.Umask,
	}
	if p.OOMScoreAdj != nil {
		adj := int32(*p.OOMScoreAdj)
		c.OOMScoreAdj = &adj
	}
	if err := setCapabilities(&c.Capabilities, p.Capabilities); err != nil {
		return nil, err
	}
	for _, r := range p.Rlimits {
		resource, ok := rlimits()[r.Type]
		if !ok {
			return nil, fmt.Errorf("claiming with limit %q: %w", r.Type, errdefs.ErrInvalidArgument)
		}
		c.Rlimits = append(c.Rlimits, Rlimit{Resource: resource, Soft: r.Soft, Hard: r.Hard})
	}
	return c, nil
}

func environment(list []string) []string {
	env := make([]string, 0, len(list)+1)
	index := make(map[string]int, len(list)+1)
	for _, kv := range list {
		key, _, ok := strings.Cut(kv, "=")
		if !ok {
			continue
		}
		if i, ok := index[key]; ok {
			env[i] = kv
			continue
		}
		index[key] = len(env)
		env = append(env, kv)
	}
	if i, ok := index["HOME"]; !ok {
		env = append(env, "HOME=/")
	} else if env[i] == "HOME=" {
		env[i] = "HOME=/"
	}
	return env
}

func setCapabilities(to *Capabilities, from *specs.LinuxCapabilities) error {
	if from == nil {
		return nil
	}
	numbers := capabilities()
	for _, set := range []struct {
		mask  *uint64
		names []string
	}{
		{&to.Bounding, from.Bounding}, {&to.Effective, from.Effective}, {&to.Permitted, from.Permitted},
		{&to.Inheritable, from.Inheritable}, {&to.Ambient, from.Ambient},
	} {
		for _, name := range set.names {
			number := slices.Index(numbers, strings.TrimPrefix(name, "CAP_"))
			if number < 0 {
				return fmt.Errorf("claiming with capability %q: %w", name, errdefs.ErrInvalidArgument)
			}
			*set.mask |= 1 << number
		}
	}
	return nil
}

// capabilities returns the names, each at the index of its number (capabilities(7)).
func capabilities() []string {
	return []string{
		"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "LINUX_IMMUTABLE",
		"NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT",
		"SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE",
		"AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ",
		"PERFMON", "BPF", "CHECKPOINT_RESTORE",
	}
}

func rlimits() map[string]uint32 {
	return map[string]uint32{
		"RLIMIT_CPU": unix.RLIMIT_CPU, "RLIMIT_FSIZE": unix.RLIMIT_FSIZE, "RLIMIT_DATA": unix.RLIMIT_DATA, "RLIMIT_STACK": unix.RLIMIT_STACK,
		"RLIMIT_CORE": unix.RLIMIT_CORE, "RLIMIT_RSS": unix.RLIMIT_RSS, "RLIMIT_NPROC": unix.RLIMIT_NPROC, "RLIMIT_NOFILE": unix.RLIMIT_NOFILE,
		"RLIMIT_MEMLOCK": unix.RLIMIT_MEMLOCK, "RLIMIT_AS": unix.RLIMIT_AS, "RLIMIT_LOCKS": unix.RLIMIT_LOCKS, "RLIMIT_SIGPENDING": unix.RLIMIT_SIGPENDING,
		"RLIMIT_MSGQUEUE": unix.RLIMIT_MSGQUEUE, "RLIMIT_NICE": unix.RLIMIT_NICE, "RLIMIT_RTPRIO": unix.RLIMIT_RTPRIO, "RLIMIT_RTTIME": unix.RLIMIT_RTTIME,
	}
}
