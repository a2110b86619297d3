// Package spawn starts processes of a sandbox from its pid 1, as any user of the sandbox. The confinement of pid 1 is theirs as well, except its
// user. It is linked into sandbox-init, and imports next to nothing. All of it is for the one thread that sandbox-init runs on: credentials belong
// to threads.
package spawn

import (
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// User is who a process runs as.
type User struct {
	UID, GID uint32
	Groups   []uint32
}

// Process is a process to start.
type Process struct {
	// Args is the command line. The first is looked up in the PATH of Env.
	Args, Env []string
	// Cwd is the working directory; empty for that of this process.
	Cwd  string
	User User
	// Ambient are the ambient capabilities, as a bit mask.
	Ambient uint64
	// Files become its standard streams, and Terminal makes the first its controlling terminal. More become its descriptors from 3 on.
	Files    [3]int
	Terminal bool
	More     []int
	// Dies: it is killed when this process ends.
	Dies bool
}

// Start starts a process in a session of its own. This process is in / afterwards.
func Start(p *Process) (pid int, failure *wire.Failure) {
	command := Resolve(p.Args[0], p.Env)
	var path string
	// The process inherits the working directory, and a relative path is looked up in it.
	defer func() { _ = unix.Chdir("/") }()
	if failure := p.User.do(func() (failure *wire.Failure) {
		if p.Cwd != "" {
			failure = Enter(p.Cwd)
		}
		if failure == nil {
			path, failure = command.Find()
		}
		return failure
	}); failure != nil {
		return 0, failure
	}
	var ambient []uintptr
	for bit := range 64 {
		if p.Ambient&(1<<bit) != 0 {
			ambient = append(ambient, uintptr(bit))
		}
	}
	files := []uintptr{uintptr(p.Files[0]), uintptr(p.Files[1]), uintptr(p.Files[2])}
	for _, fd := range p.More {
		files = append(files, uintptr(fd))
	}
	var death syscall.Signal
	if p.Dies {
		death = syscall.SIGKILL
	}
	pid, err := syscall.ForkExec(path, p.Args, &syscall.ProcAttr{
		Env: p.Env, Files: files,
		Sys: &syscall.SysProcAttr{
			Setsid: true, Setctty: p.Terminal, AmbientCaps: ambient, Pdeathsig: death,
			Credential: &syscall.Credential{Uid: p.User.UID, Gid: p.User.GID, Groups: p.User.Groups},
		},
	})
	if err != nil {
		return 0, Failed(wire.StageExec, err, path)
	}
	return pid, nil
}

// Enter changes the working directory, which must be within the root.
func Enter(path string) *wire.Failure {
	if err := unix.Chdir(path); err != nil {
		return Failed(wire.StageCwd, err, path)
	}
	var name [unix.PathMax]byte
	if n, err := unix.Getcwd(name[:]); err != nil || n == 0 || name[0] != '/' {
		return &wire.Failure{Stage: wire.StageCwd, Errno: unix.ENOENT, Detail: path + " (outside of the root)"}
	}
	return nil
}

// do calls f with the access to files that the user has: the kernel takes the capabilities that concern files from a thread whose user for files
// is not root, and gives them back.
func (u *User) do(f func() *wire.Failure) *wire.Failure {
	if u.UID == 0 && u.GID == 0 && len(u.Groups) == 0 {
		return f()
	}
	defer func() {
		unix.RawSyscall(unix.SYS_SETFSUID, 0, 0, 0) //nolint:errcheck // it returns no error
		unix.RawSyscall(unix.SYS_SETFSGID, 0, 0, 0) //nolint:errcheck // the same
		_ = setgroups(nil)
	}()
	if errno := setgroups(u.Groups); errno != 0 {
		return Failed(wire.StageUser, errno, "(groups)")
	}
	unix.RawSyscall(unix.SYS_SETFSGID, uintptr(u.GID), 0, 0) //nolint:errcheck // it returns no error
	unix.RawSyscall(unix.SYS_SETFSUID, uintptr(u.UID), 0, 0) //nolint:errcheck // the same
	// It returns the previous one, and nothing else if it could not be set.
	if now, _, _ := unix.RawSyscall(unix.SYS_SETFSUID, uintptr(u.UID), 0, 0); uint32(now) != u.UID {
		return Failed(wire.StageUser, unix.EPERM, "")
	}
	return f()
}

func setgroups(groups []uint32) unix.Errno {
	var first unsafe.Pointer
	if len(groups) > 0 {
		first = unsafe.Pointer(&groups[0]) //nolint:gosec // setgroups(2) takes an array of 32-bit ids
	}
	_, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(first), 0)
	runtime.KeepAlive(groups)
	return errno
}
