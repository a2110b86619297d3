package attack

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

func kernelFiles() []Attack {
	file := func(name, does, success string, run func(*Env) (string, error)) Attack {
		return Attack{Attempt: suite.Attempt{Name: "kernel files: " + name, Does: does, Success: success}, run: run}
	}
	opened := "it can be opened for writing"
	writable := func(name, does string, paths ...string) Attack {
		return file(name, does, opened, func(*Env) (string, error) { return first(paths, openForWriting) })
	}
	helper := writable("uevent_helper", "names a program that the kernel would run on the node at the next event of a device", "/sys/kernel/uevent_helper")
	helper.Unprovable = "kernels without CONFIG_UEVENT_HELPER do not have the file"
	score := file("oom_score_adj", "has the kernel kill others first when memory is short", "its own score is below that of ordinary processes", func(*Env) (string, error) {
		return lowerOOMScore()
	})
	score.Unprovable = "on a machine without CAP_SYS_RESOURCE no process can"
	sysrq := writable("sysrq", "has the kernel restart the node", "/proc/sysrq-trigger")
	sysrq.Unprovable = "kernels without CONFIG_MAGIC_SYSRQ do not have the file"
	modprobe := writable("modprobe path", "names a program that the kernel would run on the node for the next unknown file format", "/proc/sys/kernel/modprobe")
	modprobe.Unprovable = "kernels without modules do not have the file"
	binaries := writable("binfmt_misc", "registers an interpreter for programs of the node", "/proc/sys/fs/binfmt_misc/register", "/proc/sys/fs/binfmt_misc/status")
	binaries.Unprovable = "few nodes have it mounted"
	firmware := file("firmware", "reads the tables and variables of the firmware", "a file can be read", func(*Env) (string, error) {
		return first([]string{"/sys/firmware", "/sys/devices/virtual/powercap", "/sys/kernel/debug", "/sys/kernel/security", "/sys/fs/bpf"}, listed)
	})
	firmware.Unprovable = "machines without firmware have no such files"
	agent := file("release_agent", "names a program that the kernel would run on the node when a cgroup is empty", opened, func(*Env) (string, error) {
		evidence, refused := inCgroups(func(name string) bool { return name == "release_agent" })
		if evidence != "" {
			return evidence, refused
		}
		// A hierarchy that is mounted again shows its root (CVE-2022-0492).
		return first([]string{"memory", "pids", "rdma", "cpuset"}, releaseAgent)
	})
	agent.Unprovable = "nodes with unified cgroups do not have the file"
	return []Attack{
		sysrq,
		writable("core_pattern", "names a program that the kernel would run on the node at the next crash", "/proc/sys/kernel/core_pattern"),
		modprobe,
		binaries,
		writable("sysctls of the node", "changes settings of the memory management and of the network", "/proc/sys/vm/drop_caches", "/proc/sys/vm/overcommit_memory", "/proc/sys/net/ipv4/ip_forward"),
		writable("power state", "puts the node to sleep", "/sys/power/state", "/sys/power/mem_sleep", "/sys/kernel/mm/transparent_hugepage/enabled"),
		helper,
		agent,
		file("cgroup limits", "raises its own limits, or moves itself out of its cgroup", opened, func(*Env) (string, error) {
			return inCgroups(func(name string) bool {
				switch name {
				case "cgroup.procs", "tasks", "memory.limit_in_bytes", "memory.max", "pids.max", "cpu.cfs_quota_us", "cpu.max", "devices.allow":
					return true
				}
				return false
			})
		}),
		file("any writable file of /proc", "opens every file of /proc that is not a process's for writing", opened, func(*Env) (string, error) { return walk("/proc", skipProcesses) }),
		file("any writable file of /sys", "opens every file of /sys for writing", opened, func(*Env) (string, error) { return walk("/sys", nil) }),
		score,
		file("memory of the kernel", "reads the memory of the kernel, its keys and its log", "a byte can be read", func(*Env) (string, error) {
			return first([]string{"/proc/kcore", "/proc/kmsg", "/dev/mem", "/dev/kmsg", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/sys/kernel/debug/sched/debug"}, readable)
		}),
		file("addresses of the kernel", "reads where the kernel's functions are", "an address is not zero", func(*Env) (string, error) { return kernelAddresses() }),
		firmware,
	}
}

// releaseAgent mounts a legacy hierarchy and opens the file in its root.
func releaseAgent(hierarchy string) (evidence string, err error) {
	_, err = within(func(dir string) error {
		if err := unix.Mount("cgroup", dir, "cgroup", 0, hierarchy); err != nil {
			return err
		}
		defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
		var refused error
		evidence, refused = openForWriting(filepath.Join(dir, "release_agent"))
		return refused
	})
	return evidence, err
}

// openForWriting opens a file and writes nothing.
func openForWriting(path string) (string, error) {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	_ = unix.Close(fd)
	return path + " is open for writing", nil
}

func readable(path string) (string, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = unix.Close(fd) }()
	n, err := unix.Read(fd, make([]byte, 16))
	switch {
	case err != nil:
		return "", err
	case n == 0:
		return "", errors.New("it is empty")
	}
	return fmt.Sprintf("%d bytes of %s", n, path), nil
}

// listed returns evidence if a directory has entries other than empty directories.
func listed(dir string) (string, error) {
	found := ""
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case !d.IsDir():
			found = path
			return fs.SkipAll
		}
		return nil
	})
	if found != "" {
		return found + " is there", nil
	}
	return "", err
}

// inCgroups opens the files of /sys/fs/cgroup that match for writing.
func inCgroups(match func(name string) bool) (string, error) {
	var refused error
	seen, evidence := 0, ""
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !match(d.Name()) {
			return nil //nolint:nilerr // what cannot be read is not a way out
		}
		if evidence, refused = openForWriting(path); evidence != "" {
			return fs.SkipAll
		}
		if seen++; seen > 2000 {
			return fs.SkipAll
		}
		return nil
	})
	if evidence == "" && seen == 0 {
		refused = errors.New("there is no such file")
	}
	return evidence, refused
}

// maxWalked bounds the files that one attack opens.
const maxWalked = 100_000

// walk opens every regular file below a directory for writing, and returns the first one for which that works.
func walk(root string, skip func(path string) bool) (string, error) {
	evidence, n := "", 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return nil //nolint:nilerr // what cannot be read is not a way out
		case d.IsDir() && skip != nil && skip(path):
			return fs.SkipDir
		case d.IsDir():
			return nil
		}
		if n++; n > maxWalked {
			return fs.SkipAll
		}
		// By its own mode: a directory still lists a file that is masked as what it was.
		if info, err := d.Info(); err != nil || !info.Mode().IsRegular() || info.Mode().Perm()&0o222 == 0 {
			return nil //nolint:nilerr // it cannot be written to, or no longer exists
		}
		if evidence, _ = openForWriting(path); evidence != "" {
			return fs.SkipAll
		}
		return nil
	})
	if evidence == "" && err == nil {
		err = fmt.Errorf("none of %d files can be opened", n)
	}
	return evidence, err
}

// skipProcesses skips what belongs to processes, and /proc/pressure, by whose files a process can have itself notified, and no more.
func skipProcesses(path string) bool {
	name := filepath.Base(path)
	_, err := strconv.Atoi(name)
	return filepath.Dir(path) == "/proc" && (err == nil || name == "self" || name == "thread-self" || name == "pressure")
}

// lowerOOMScore sets its score below 0, that of ordinary processes. Where the container runtime itself has no CAP_SYS_RESOURCE, a
// sandbox may lower its score to that of the runtime, which is not below.
func lowerOOMScore() (string, error) {
	const path, below = "/proc/self/oom_score_adj", "-1"
	if err := os.WriteFile(path, []byte(below), 0); err != nil {
		return "", err
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", suite.Brokenf("reading the score: %w", err)
	}
	if got := strings.TrimSpace(string(raw)); got != below {
		return "", fmt.Errorf("the score is %s", got)
	}
	return "the score is " + below, nil
}

func kernelAddresses() (string, error) {
	raw, err := os.ReadFile("/proc/kallsyms")
	if err != nil {
		return "", err
	}
	for line := range bytes.Lines(raw) {
		address, _, _ := strings.Cut(string(line), " ")
		if strings.Trim(address, "0") != "" {
			return "/proc/kallsyms: " + strings.TrimSpace(string(line)), nil
		}
	}
	return "", errors.New("all addresses are zero")
}
