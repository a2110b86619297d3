// Command probe prints, as one JSON object, all that a sandboxed process can see of its confinement. Tests run it in a cold
// container and in a claimed slot and compare the output. It changes nothing that outlives it.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Report is what the probe prints.
type Report struct {
	Args, Env  []string
	Cwd, Host  string
	PID, PPID  int
	SID, PGID  int
	Status     map[string]string // fields of /proc/self/status
	OOM        string
	Limits     map[string]string // soft and hard, of /proc/self/limits
	Securebits int
	TTY        string            // the result of opening /dev/tty
	FDs        map[string]string // number to target, without inode numbers
	Mounts     []string          // mount point, options, type
	Root       []string          // entries of /
	Unreadable map[string]string // masked and read-only paths: the result of reading or writing them
	Syscalls   map[string]string // the result of each
	Keyring    string            // the session keyring's type, owner and rights
	UIDs, GIDs string            // the ids of the user namespace
	Owners     map[string]string // of files of the image, of the agent and of the kernel
	Processes  []string          // the commands of all processes in /proc
}

func main() {
	r := Report{Args: os.Args, Env: syscall.Environ(), PID: os.Getpid(), PPID: os.Getppid(), PGID: syscall.Getpgrp()}
	r.Cwd, _ = syscall.Getwd()
	r.Host, _ = os.Hostname()
	r.SID, _ = unix.Getsid(0)
	r.Securebits, _ = unix.PrctlRetInt(unix.PR_GET_SECUREBITS, 0, 0, 0, 0)
	r.OOM = content("/proc/self/oom_score_adj")
	_, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	r.TTY = outcome(err)
	r.Status, r.Limits = status(), limits()
	r.FDs = descriptors()
	r.Mounts = mounts()
	entries, _ := os.ReadDir("/")
	for _, e := range entries {
		r.Root = append(r.Root, e.Name())
	}
	r.Unreadable = paths()
	r.Syscalls = calls()
	r.Keyring = keyring()
	r.UIDs, r.GIDs = strings.Join(strings.Fields(content("/proc/self/uid_map")), " "), strings.Join(strings.Fields(content("/proc/self/gid_map")), " ")
	r.Owners = owners()
	processes, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range processes {
		r.Processes = append(r.Processes, strings.ReplaceAll(content(p), "\x00", " "))
	}
	if err := json.NewEncoder(os.Stdout).Encode(r); err != nil {
		os.Exit(1)
	}
}

func content(path string) string {
	raw, err := os.ReadFile(path)
	if err != nil {
		return outcome(err)
	}
	return strings.TrimSpace(string(raw))
}

// outcome returns the errno's text.
func outcome(err error) string {
	for err != nil {
		if errno, ok := err.(syscall.Errno); ok { //nolint:errorlint // the chain is walked here
			return errno.Error()
		}
		inner, ok := err.(interface{ Unwrap() error })
		if !ok {
			return err.Error()
		}
		err = inner.Unwrap()
	}
	return "done"
}

func status() map[string]string {
	found := map[string]string{}
	for line := range strings.Lines(content("/proc/self/status")) {
		key, value, _ := strings.Cut(line, ":")
		switch key {
		case "Umask", "Uid", "Gid", "Groups", "NStgid", "SigBlk", "SigIgn", "ShdPnd", "SigPnd", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb",
			"NoNewPrivs", "Seccomp", "Seccomp_filters", "Speculation_Store_Bypass", "SpeculationIndirectBranch", "CoreDumping", "THP_enabled", "TracerPid":
			found[key] = strings.Join(strings.Fields(value), " ")
		}
	}
	return found
}

// limits returns the limits by name. The names contain spaces; columns are two or more apart.
func limits() map[string]string {
	found := map[string]string{}
	for line := range strings.Lines(content("/proc/self/limits")) {
		if name, values, ok := strings.Cut(line, "  "); ok && name != "Limit" {
			found[name] = strings.Join(strings.Fields(values), " ")
		}
	}
	return found
}

func descriptors() map[string]string {
	found := map[string]string{}
	for fd := range 64 {
		target, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
		flags, ferr := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		// Those of the Go runtime are all closed on exec.
		if err != nil || ferr != nil || (fd > 2 && flags&unix.FD_CLOEXEC != 0) {
			continue
		}
		kind, _, _ := strings.Cut(target, ":")
		found[strconv.Itoa(fd)] = filepath.Base(kind)
	}
	return found
}

func mounts() []string {
	var found []string
	for line := range strings.Lines(content("/proc/self/mountinfo")) {
		f := strings.Fields(line)
		before, after, _ := strings.Cut(line, " - ")
		fstype := strings.Fields(after)
		if len(f) < 6 || len(fstype) == 0 || before == "" {
			continue
		}
		found = append(found, strings.Join([]string{f[4], f[5], fstype[0]}, " "))
	}
	slices.Sort(found) // a slot's have another order
	return found
}

func paths() map[string]string {
	found := map[string]string{}
	for _, p := range []string{"/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/proc/interrupts", "/proc/latency_stats"} {
		raw := make([]byte, 1)
		f, err := os.Open(p)
		n := 0
		if err == nil {
			n, err = f.Read(raw)
			_ = f.Close()
		}
		found["read "+p] = fmt.Sprint(outcome(err), " ", n)
	}
	for _, p := range []string{"/sys/firmware", "/proc/acpi", "/proc/scsi"} {
		entries, err := os.ReadDir(p)
		found["list "+p] = fmt.Sprint(outcome(err), " ", len(entries))
	}
	for _, p := range []string{"/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches", "/sys/kernel/profiling", "/proc/1/mem"} {
		f, err := os.OpenFile(p, os.O_WRONLY, 0)
		if err == nil {
			_ = f.Close()
		}
		found["write "+p] = outcome(err)
	}
	return found
}

func owners() map[string]string {
	found := map[string]string{}
	for _, p := range []string{"/", "/probe", "/etc/hostname", "/dev", "/dev/null", "/dev/stdin", "/dev/pts", "/dev/shm", "/proc/self/stat", "/proc/sys", "/sys"} {
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			found[p] = outcome(err)
			continue
		}
		found[p] = fmt.Sprintf("%d:%d %o", st.Uid, st.Gid, st.Mode)
	}
	return found
}

// keyring describes the session keyring: what it is called has the container's id in it.
func keyring() string {
	id, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, false)
	if err != nil {
		return outcome(err)
	}
	text, err := unix.KeyctlString(unix.KEYCTL_DESCRIBE, id)
	if err != nil {
		return outcome(err)
	}
	return text[:strings.LastIndex(text, ";")]
}
