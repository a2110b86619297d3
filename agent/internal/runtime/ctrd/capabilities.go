package ctrd

import (
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// defaultCapabilities returns the capabilities of root in every sandbox: what an image may expect of Docker, without those that an
// administrator has to grant.
func defaultCapabilities() []string {
	return []string{
		"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_SETGID", "CAP_SETUID",
		"CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL",
	}
}

// GrantableCapabilities returns the capabilities, without the prefix CAP_, that a pool can add to the default set. Docker's default set
// has them, and few programs need them. NET_RAW opens raw and packet sockets: a sandbox shares the network of its agent, so that it could
// read and forge the packets of its neighbors there. MKNOD makes device nodes, and AUDIT_WRITE writes to the kernel's audit log.
func GrantableCapabilities() []string { return []string{"NET_RAW", "MKNOD", "AUDIT_WRITE"} }

// CheckCapabilities checks the capabilities that a pool adds. The error is errdefs.ErrInvalidArgument, and names those that no pool can add.
func CheckCapabilities(added []string) error {
	var other []string
	for _, name := range added {
		if !slices.Contains(GrantableCapabilities(), name) {
			other = append(other, fmt.Sprintf("%q", name))
		}
	}
	if len(other) == 0 {
		return nil
	}
	return fmt.Errorf("%s cannot be added to the capabilities of sandboxes; use only %s: %w",
		strings.Join(other, ", "), strings.Join(GrantableCapabilities(), ", "), errdefs.ErrInvalidArgument)
}

// capabilities returns all capabilities that a sandbox ever has. What cannot be added is not.
func capabilities(added []string) []string {
	caps := defaultCapabilities()
	for _, name := range GrantableCapabilities() {
		if slices.Contains(added, name) {
			caps = append(caps, "CAP_"+name)
		}
	}
	return caps
}

// maxOpenFiles bounds the open files of each process. Otherwise it is that of containerd, which often has no bound, and with one
// descriptor for each of them a process can have the kernel keep files for gigabytes.
const maxOpenFiles = 65_536

// rlimits returns the limits of a container's processes. A slot has them too: at the claim it could not raise them. None is above the
// agent's own, because the OCI runtime, which containerd starts as it has started the agent, may not be allowed to raise it.
//
// Core files are off: where the kernel writes them to files, it writes as many and as large ones as a sandbox likes.
func rlimits() []specs.POSIXRlimit {
	files := uint64(maxOpenFiles)
	var own unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &own); err == nil {
		files = min(files, own.Max)
	}
	return []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: files, Hard: files}, {Type: "RLIMIT_CORE"}}
}
