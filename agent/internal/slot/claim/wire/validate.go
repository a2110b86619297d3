package wire

import (
	"slices"
	"syscall"
)

// unchanged is the id that setresuid(2) ignores, which would leave root.
const unchanged = ^uint32(0)

// validate checks the bounds and forms that both sides rely on. The error is a Failure.
func (c *Claim) validate() error {
	if c.KeepAlive != (len(c.Args) == 0) || !c.KeepAlive && c.Args[0] == "" {
		return &Failure{Stage: StageLookup, Errno: syscall.ENOENT}
	}
	for _, list := range [][]string{c.Args, c.Env} {
		for _, s := range list {
			if hasZero(s) {
				return malformed("an argument or variable has a zero byte in it")
			}
		}
	}
	if !isPath(c.Cwd) {
		return &Failure{Stage: StageCwd, Errno: syscall.EINVAL, Detail: "a path that is not absolute or too long"}
	}
	switch {
	case c.UID == unchanged || c.GID == unchanged || slices.Contains(c.Groups, unchanged):
		return &Failure{Stage: StageUser, Errno: syscall.EINVAL}
	case len(c.Hostname) > maxName || hasZero(c.Hostname):
		return &Failure{Stage: StageHostname, Errno: syscall.EINVAL}
	case len(c.Groups) > maxGroups:
		return &Failure{Stage: StageUser, Errno: syscall.EINVAL, Detail: "groups"}
	case len(c.Mounts) > MaxMounts:
		return tooManyMounts()
	}
	if err := c.validateConfinement(); err != nil {
		return err
	}
	for _, m := range c.Mounts {
		if !isPath(m.Destination) || (m.Path != "" && !isPath(m.Path)) {
			return &Failure{Stage: StageMount, Errno: syscall.EINVAL, Detail: "a path that is not absolute or too long"}
		}
	}
	return nil
}

func (c *Claim) validateConfinement() error {
	switch {
	case len(c.Rlimits) > maxRlimits:
		return tooManyRlimits()
	case len(c.Seccomp) > maxFilter || len(c.Seccomp)%8 != 0:
		return &Failure{Stage: StageSeccomp, Errno: syscall.EINVAL}
	case len(c.AppArmorProfile) > maxProfile || hasZero(c.AppArmorProfile):
		return &Failure{Stage: StageAppArmor, Errno: syscall.EINVAL}
	case c.Umask != nil && *c.Umask > 0o777:
		return malformed("the umask is not a file mode")
	}
	return nil
}

func tooManyMounts() error {
	return &Failure{Stage: StageMount, Errno: syscall.EINVAL, Detail: "too many of them"}
}

func tooManyRlimits() error { return &Failure{Stage: StageRlimit, Errno: syscall.EINVAL} }

func tooLong() error { return &Failure{Stage: StageExec, Errno: syscall.E2BIG} }

func isPath(s string) bool { return len(s) > 0 && s[0] == '/' && len(s) < maxPath && !hasZero(s) }

func hasZero(s string) bool {
	for i := range len(s) {
		if s[i] == 0 {
			return true
		}
	}
	return false
}
