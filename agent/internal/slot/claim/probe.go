package claim

import (
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Supported returns nil if the kernel has the system calls that claims need (Linux 5.12), and lets this process use them:
// fsopen(2) and fsmount(2) need CAP_SYS_ADMIN. The error is errdefs.ErrNotImplemented and names the first that is missing.
func Supported() error {
	calls := []struct {
		name   string
		number uintptr
	}{
		{"fsopen", unix.SYS_FSOPEN}, {"fsconfig", unix.SYS_FSCONFIG}, {"fsmount", unix.SYS_FSMOUNT}, {"open_tree", unix.SYS_OPEN_TREE},
		{"move_mount", unix.SYS_MOVE_MOUNT}, {"openat2", unix.SYS_OPENAT2}, {"close_range", unix.SYS_CLOSE_RANGE}, {"mount_setattr", unix.SYS_MOUNT_SETATTR},
	}
	for _, c := range calls {
		// Invalid arguments: all flags, and null pointers.
		const all = ^uintptr(0)
		_, _, errno := unix.Syscall6(c.number, all, 0, all, all, all, all)
		if errno == unix.ENOSYS || errno == unix.EPERM {
			return fmt.Errorf("calling %s(2): %w", c.name, errors.Join(errno, errdefs.ErrNotImplemented))
		}
	}
	return nil
}
