package main

import (
	"errors"
	"runtime"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/supervisor/spawn"
)

// become confines this thread as the claim says and executes the command. It returns only if that fails.
//
// The order is runc's. What needs a privilege or /proc comes before the privilege is dropped; the bounding set shrinks while
// CAP_SETPCAP is held, the user changes with the capabilities kept, and then these are dropped, so that none can be regained.
// The filter comes last, so that it need not allow any of this; only if the process may gain privileges it comes before they
// are dropped, because the kernel then requires CAP_SYS_ADMIN.
func become(c *wire.Claim, entered bool) *wire.Failure {
	command := spawn.Resolve(c.Args[0], c.Env) // before the limits, which may restrict memory
	if failure := prepare(c); failure != nil {
		return failure
	}
	if c.NoNewPrivs {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return failed(wire.StageCapability, err, "(no new privileges)")
		}
	} else if failure := filter(c); failure != nil {
		return failure
	}
	if failure := limit(c.Rlimits); failure != nil {
		return failure
	}
	if failure := bound(c.Capabilities.Bounding); failure != nil {
		return failure
	}
	if failure := impersonate(c); failure != nil {
		return failure
	}
	if !entered {
		if failure := spawn.Enter(c.Cwd); failure != nil {
			return failure
		}
	}
	if failure := capabilities(&c.Capabilities); failure != nil {
		return failure
	}
	path, failure := command.Find()
	if failure != nil {
		return failure
	}
	if err := unblock(); err != nil {
		return failed(wire.StageExec, err, "(signal mask)")
	}
	if c.NoNewPrivs {
		if failure := filter(c); failure != nil {
			return failure
		}
	}
	return failed(wire.StageExec, unix.Exec(path, c.Args, c.Env), path)
}

// prepare does what only root can do, or only while /proc/self belongs to root.
func prepare(c *wire.Claim) *wire.Failure {
	umask := 0o022
	if c.Umask != nil {
		umask = int(*c.Umask)
	}
	unix.Umask(umask)
	if failure := stdio(c.UID); failure != nil {
		return failure
	}
	if c.OOMScoreAdj != nil {
		if failure := adjustOOMScore(int(*c.OOMScoreAdj)); failure != nil {
			return failure
		}
	}
	if c.AppArmorProfile != "" {
		err := write("/proc/thread-self/attr/apparmor/exec", "exec "+c.AppArmorProfile)
		if errors.Is(err, unix.ENOENT) {
			err = write("/proc/thread-self/attr/exec", "exec "+c.AppArmorProfile)
		}
		if err != nil {
			return failed(wire.StageAppArmor, err, c.AppArmorProfile)
		}
	}
	return nil
}

func adjustOOMScore(score int) *wire.Failure {
	const path = "/proc/self/oom_score_adj"
	value := strconv.Itoa(score)
	// An unchanged value is not written: even that may need a capability that the host does not grant.
	if now, err := read(path); err == nil && now == value+"\n" {
		return nil
	}
	if err := write(path, value); err != nil {
		return failed(wire.StageOOM, err, value)
	}
	return nil
}

// stdio makes the user the owner of the standard streams, so that the process can open them by name.
func stdio(uid uint32) *wire.Failure {
	var null unix.Stat_t
	if err := unix.Stat("/dev/null", &null); err != nil {
		return failed(wire.StageStdio, err, "/dev/null")
	}
	for fd := range 3 {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return failed(wire.StageStdio, err, strconv.Itoa(fd))
		}
		if st.Uid == uid || st.Rdev == null.Rdev {
			continue
		}
		err := unix.Fchown(fd, int(uid), int(st.Gid))
		switch {
		case err == nil, errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPERM), errors.Is(err, unix.EROFS): // as in runc
		default:
			return failed(wire.StageStdio, err, strconv.Itoa(fd))
		}
	}
	return nil
}

func limit(limits []wire.Rlimit) *wire.Failure {
	for _, l := range limits {
		if err := unix.Prlimit(0, int(l.Resource), &unix.Rlimit{Cur: l.Soft, Max: l.Hard}, nil); err != nil {
			return failed(wire.StageRlimit, err, strconv.Itoa(int(l.Resource)))
		}
	}
	return nil
}

// bound drops from the bounding set what is not in the mask.
func bound(mask uint64) *wire.Failure {
	for bit := range 64 {
		has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(bit), 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			return nil // after the kernel's last capability
		}
		if err == nil && has == 1 && mask&(1<<bit) == 0 {
			err = unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(bit), 0, 0, 0)
		}
		if err != nil {
			return failed(wire.StageCapability, err, "(bounding) "+strconv.Itoa(bit))
		}
	}
	return nil
}

// impersonate sets the user and groups of this thread, and keeps the permitted capabilities.
func impersonate(c *wire.Claim) *wire.Failure {
	var groups unsafe.Pointer
	if len(c.Groups) > 0 {
		groups = unsafe.Pointer(&c.Groups[0]) //nolint:gosec // setgroups(2) takes an array of 32-bit ids
	}
	if err := unix.Prctl(unix.PR_SET_KEEPCAPS, 1, 0, 0, 0); err != nil {
		return failed(wire.StageUser, err, "(keeping capabilities)")
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(c.Groups)), uintptr(groups), 0); errno != 0 {
		return failed(wire.StageUser, errno, "(groups)")
	}
	runtime.KeepAlive(c.Groups)
	gid, uid := uintptr(c.GID), uintptr(c.UID)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, gid, gid, gid); errno != 0 {
		return failed(wire.StageUser, errno, "(group) "+strconv.Itoa(int(c.GID)))
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid); errno != 0 {
		return failed(wire.StageUser, errno, "(user) "+strconv.Itoa(int(c.UID)))
	}
	if err := unix.Prctl(unix.PR_SET_KEEPCAPS, 0, 0, 0, 0); err != nil {
		return failed(wire.StageUser, err, "(keeping capabilities)")
	}
	return nil
}

func capabilities(c *wire.Capabilities) *wire.Failure {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{
		{Effective: uint32(c.Effective), Permitted: uint32(c.Permitted), Inheritable: uint32(c.Inheritable)},
		{Effective: uint32(c.Effective >> 32), Permitted: uint32(c.Permitted >> 32), Inheritable: uint32(c.Inheritable >> 32)},
	}
	if err := unix.Capset(&header, &data[0]); err != nil {
		return failed(wire.StageCapability, err, "")
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return failed(wire.StageCapability, err, "(ambient)")
	}
	for bit := range 64 {
		if c.Ambient&(1<<bit) == 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, uintptr(bit), 0, 0); err != nil {
			return failed(wire.StageCapability, err, "(ambient) "+strconv.Itoa(bit))
		}
	}
	return nil
}

// filter loads the seccomp filter for this thread, the only one that outlives the exec.
func filter(c *wire.Claim) *wire.Failure {
	if len(c.Seccomp) == 0 {
		return nil
	}
	const size = int(unsafe.Sizeof(unix.SockFilter{}))
	program := unix.SockFprog{Len: uint16(len(c.Seccomp) / size), Filter: (*unix.SockFilter)(unsafe.Pointer(&c.Seccomp[0]))}                   //nolint:gosec // the bytes are an array of it
	_, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, uintptr(c.SeccompFlags), uintptr(unsafe.Pointer(&program))) //nolint:gosec // the same
	runtime.KeepAlive(c)
	if errno != 0 {
		return failed(wire.StageSeccomp, errno, "")
	}
	return nil
}

// unblock clears the signal mask, which an exec keeps.
func unblock() error {
	var none unix.Sigset_t
	return unix.PthreadSigmask(unix.SIG_SETMASK, &none, nil)
}
