package runtime

import (
	"strings"
	"syscall"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// shortages says, for each error of the kernel that means that a node lacks something, what to do about it. Most of these errors come through
// containerd and its shims, as text.
var shortages = [...]struct { //nolint:gochecknoglobals // constant
	errno  syscall.Errno
	advice string
}{
	{syscall.ENOSPC, "free disk space or inodes on the node, and remove cgroups that nothing uses"},
	{syscall.EDQUOT, "raise the disk quota on the node"},
	{syscall.ENFILE, "raise fs.file-max on the node"}, // before EMFILE, whose text it begins with
	{syscall.EMFILE, "raise the limit of open files (RLIMIT_NOFILE) of containerd and of the agent"},
	{syscall.ENOMEM, "free memory on the node, or raise the memory limit of the agent's Pod"},
	{syscall.EAGAIN, "raise the limit of processes (pids.max) or of cgroups (cgroup.max.descendants) above the agent's Pod"},
}

// Shortage returns a fault if err, which occurred while a container was created, means that the node lacks disk space, file descriptors, memory,
// processes or cgroups: another node may have them. It returns other errors, and faults, as they are.
func Shortage(err error) error {
	if err == nil || fault.ReasonOf(err) != "" {
		return err
	}
	text := err.Error()
	for _, s := range shortages {
		if strings.Contains(text, s.errno.Error()) {
			return fault.Wrap(err, errdefs.ErrResourceExhausted, fault.NoCapacity, "the node cannot create a container now: %s; %s", s.errno.Error(), s.advice)
		}
	}
	return err
}
