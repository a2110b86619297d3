package attack

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// Inherited is the attack that the first process of a sandbox makes at its start, before it opens anything itself.
func Inherited() Attack {
	return Attack{
		Attempt: suite.Attempt{Name: "descriptors: inherited", Does: "lists the descriptors that the first process of the sandbox was started with",
			Success: "there is one beside the standard streams, or one of those is a directory or a socket"},
		Unprovable: "runc closes them in the open container, too; a unit test has one",
		run:        func(*Env) (string, error) { return inherited() },
	}
}

func descriptors() []Attack {
	return []Attack{
		Inherited(),
		{
			Attempt: suite.Attempt{Name: "descriptors: of every process", Does: "walks up from the directories that visible processes have open, and opens their files",
				Success: "the canary on the node can be read, or a file that is no stream of the sandbox can be opened for writing"},
			run: func(e *Env) (string, error) {
				return first(all(), func(pid int) (string, error) { return descriptorsOf(e, pid) })
			},
		},
		{
			Attempt: suite.Attempt{Name: "descriptors: working directory", Does: "walks up from its working directory and its root", Success: "the canary on the node can be read"},
			run: func(e *Env) (string, error) {
				return first([]string{".", "/", "/proc/self/cwd", "/proc/1/cwd", "/proc/self/root", "/dev/fd"}, func(dir string) (string, error) {
					return canary(e, upward(e, dir))
				})
			},
		},
		{
			Attempt: suite.Attempt{Name: "descriptors: handle of a file", Does: "opens files of the node's file system by their handles, which need no path",
				Success: "a file can be opened by its handle"},
			run: func(*Env) (string, error) { return openByHandle() },
		},
	}
}

// inherited looks at the descriptors by number, because opening /proc/self/fd would add one. Those of the Go runtime are closed on
// exec; a process inherits none that is.
func inherited() (string, error) {
	var found []string
	for fd := range 1024 {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		if err != nil || (fd > 2 && flags&unix.FD_CLOEXEC != 0) {
			continue
		}
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			continue
		}
		kind := st.Mode & unix.S_IFMT
		if fd > 2 || kind == unix.S_IFDIR || kind == unix.S_IFSOCK || kind == unix.S_IFBLK {
			target, _ := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
			found = append(found, fmt.Sprintf("%d is %s", fd, target))
		}
	}
	if len(found) > 0 {
		return strings.Join(found, ", "), nil
	}
	return "", errors.New("there are only the standard streams")
}

// descriptorsOf tries the descriptors of a process: its own, too, because all were given to it or opened within the sandbox.
func descriptorsOf(e *Env, pid int) (string, error) {
	links, err := filepath.Glob(procPath(pid, "fd") + "/*")
	if err != nil || len(links) == 0 {
		return "", errors.New("no descriptor can be seen")
	}
	return first(links, func(link string) (string, error) {
		target, err := os.Readlink(link)
		if err != nil {
			return "", err
		}
		if info, err := os.Stat(link); err == nil && info.IsDir() {
			return canary(e, upward(e, link))
		}
		if !filepath.IsAbs(target) || strings.HasPrefix(target, "/dev/") || isStream(link) {
			return "", fmt.Errorf("%s is no file", target)
		}
		// A file that has the same path within the sandbox is the sandbox's own.
		if same, err := sameFile(link, target); err == nil && same {
			return "", fmt.Errorf("%s is in the sandbox", target)
		}
		return openForWriting(link)
	})
}

// isStream reports whether a link is that of a standard stream. The log of a sandbox is a file of the node, which it may append to.
func isStream(link string) bool {
	n, err := strconv.Atoi(filepath.Base(link))
	return err == nil && n <= 2
}

func sameFile(a, b string) (bool, error) {
	x, err := os.Stat(a)
	if err != nil {
		return false, err
	}
	y, err := os.Stat(b)
	if err != nil {
		return false, err
	}
	return os.SameFile(x, y), nil
}

// openByHandle opens the root by its handle, as it would open inode 2, the root of the node's disk.
func openByHandle() (string, error) {
	handle, _, err := unix.NameToHandleAt(unix.AT_FDCWD, "/etc/hostname", 0)
	if err != nil {
		handle, _, err = unix.NameToHandleAt(unix.AT_FDCWD, "/", 0)
	}
	if err != nil { // overlays without an index have no handles: any will do
		h := unix.NewFileHandle(1, make([]byte, 8))
		handle = h
	}
	dir, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", suite.Brokenf("opening /: %w", err)
	}
	defer func() { _ = unix.Close(dir) }()
	fd, err := unix.OpenByHandleAt(dir, handle, unix.O_RDONLY|unix.O_CLOEXEC)
	if err == nil {
		_ = unix.Close(fd)
		return "a file is open by its handle", nil
	}
	return reached("open_by_handle_at", errnoOf(err))
}
