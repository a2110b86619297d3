package main

import (
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// calls makes system calls that a sandbox must not make, and some that it may, with arguments that are harmless if the call
// is allowed, and returns the result of each. Those of the x32 ABI are omitted: they kill the thread.
func calls() map[string]string {
	const nowhere = ^uintptr(0)
	list := []struct {
		name string
		nr   uintptr
		args [4]uintptr
	}{
		{"mount", unix.SYS_MOUNT, [4]uintptr{nowhere, nowhere, nowhere}},
		{"umount2", unix.SYS_UMOUNT2, [4]uintptr{nowhere}},
		{"pivot_root", unix.SYS_PIVOT_ROOT, [4]uintptr{nowhere, nowhere}},
		{"chroot", unix.SYS_CHROOT, [4]uintptr{nowhere}},
		{"open_tree", unix.SYS_OPEN_TREE, [4]uintptr{nowhere, nowhere}},
		{"move_mount", unix.SYS_MOVE_MOUNT, [4]uintptr{nowhere, nowhere, nowhere, nowhere}},
		{"fsopen", unix.SYS_FSOPEN, [4]uintptr{nowhere}},
		{"mount_setattr", unix.SYS_MOUNT_SETATTR, [4]uintptr{nowhere, nowhere}},
		{"setns", unix.SYS_SETNS, [4]uintptr{nowhere}},
		{"unshare nothing", unix.SYS_UNSHARE, [4]uintptr{0}},
		{"clone of a user namespace", unix.SYS_CLONE, [4]uintptr{unix.CLONE_NEWUSER | unix.CLONE_FS}},
		{"clone3", unix.SYS_CLONE3, [4]uintptr{nowhere, 1}},
		{"ptrace", unix.SYS_PTRACE, [4]uintptr{nowhere}},
		{"process_vm_readv", unix.SYS_PROCESS_VM_READV, [4]uintptr{nowhere}},
		{"bpf", unix.SYS_BPF, [4]uintptr{nowhere}},
		{"perf_event_open", unix.SYS_PERF_EVENT_OPEN, [4]uintptr{nowhere}},
		{"keyctl", unix.SYS_KEYCTL, [4]uintptr{nowhere}},
		{"add_key", unix.SYS_ADD_KEY, [4]uintptr{nowhere}},
		{"init_module", unix.SYS_INIT_MODULE, [4]uintptr{nowhere}},
		{"kexec_load", unix.SYS_KEXEC_LOAD, [4]uintptr{nowhere}},
		{"reboot", unix.SYS_REBOOT, [4]uintptr{0}},
		{"swapon", unix.SYS_SWAPON, [4]uintptr{nowhere}},
		{"settimeofday", unix.SYS_SETTIMEOFDAY, [4]uintptr{nowhere}},
		{"sethostname", unix.SYS_SETHOSTNAME, [4]uintptr{nowhere, 1}},
		{"open_by_handle_at", unix.SYS_OPEN_BY_HANDLE_AT, [4]uintptr{nowhere}},
		{"userfaultfd", unix.SYS_USERFAULTFD, [4]uintptr{nowhere}},
		{"io_uring_setup", unix.SYS_IO_URING_SETUP, [4]uintptr{0}},
		{"personality", unix.SYS_PERSONALITY, [4]uintptr{0xffffffff}},
		{"personality without randomization", unix.SYS_PERSONALITY, [4]uintptr{0x0040000}},
		{"socket of AF_ALG", unix.SYS_SOCKET, [4]uintptr{unix.AF_ALG, unix.SOCK_SEQPACKET}},
		{"socket of AF_VSOCK", unix.SYS_SOCKET, [4]uintptr{unix.AF_VSOCK, unix.SOCK_STREAM}},
		{"raw socket", unix.SYS_SOCKET, [4]uintptr{unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP}},
		{"packet socket", unix.SYS_SOCKET, [4]uintptr{unix.AF_PACKET, unix.SOCK_RAW}},
		{"audit socket", unix.SYS_SOCKET, [4]uintptr{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT}},
		{"getpid", unix.SYS_GETPID, [4]uintptr{}},
		{"setuid 0", unix.SYS_SETUID, [4]uintptr{0}},
		{"setgroups", unix.SYS_SETGROUPS, [4]uintptr{0, 0}},
		{"a number that no kernel has", 5000, [4]uintptr{}},
	}
	found := map[string]string{}
	for _, c := range list {
		_, _, errno := unix.RawSyscall6(c.nr, c.args[0], c.args[1], c.args[2], c.args[3], 0, 0)
		found[c.name] = "done"
		if errno != 0 {
			found[c.name] = errno.Error()
		}
	}
	found["making a device"] = text(syscall.Mknod("/tmp/probe-device", syscall.S_IFBLK|0o600, 0x0801))
	_ = syscall.Unlink("/tmp/probe-device")
	raise(found)
	return found
}

// raise adds the capabilities that cannot be added to the ambient set.
func raise(found map[string]string) {
	for bit := range 41 {
		if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, uintptr(bit), 0, 0); err != nil {
			found["raising capability "+strconv.Itoa(bit)] = err.Error()
		}
	}
}

func text(err error) string {
	if err == nil {
		return "done"
	}
	return err.Error()
}
