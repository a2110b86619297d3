package host

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Process names one process for all time: pids are reused, a pid with its start time (clock ticks since boot) is not.
type Process struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"startTime"`
}

// Info is what /proc reports about a process.
type Info struct {
	Process
	PPID   int
	Zombie bool
	// Exe is the path of the program, without the mark of a file that was replaced meanwhile; empty for kernel threads.
	Exe string
	// Args is its command line: what it calls itself. A process is identified by Exe, not by this.
	Args []string
	// Nested reports whether it is in a PID namespace below that of /proc, as the processes of containers are.
	Nested bool
	// Cgroups are its paths below the root of each hierarchy.
	Cgroups []string
}

// Program returns the base name of the program that the process executes. A program that is many in one, of which multiCall is the
// name, is the one that its command line asks for.
func (i Info) Program(multiCall string) string {
	name := filepath.Base(i.Exe)
	switch {
	case i.Exe == "":
		return ""
	case name == multiCall && len(i.Args) > 0:
		return filepath.Base(i.Args[0])
	}
	return name
}

// CloseOnExec marks every file above standard error that this process has inherited, so that its children do not inherit it:
// one that outlives the caller would keep the caller's locks.
func CloseOnExec() error {
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("marking inherited files: %w", err)
	}
	return nil
}

// Self is the calling process.
func Self() (Process, error) {
	info, err := readStat(os.Getpid())
	return info.Process, err
}

// Lookup names the process that now has this pid.
func Lookup(pid int) (Process, error) {
	info, err := readStat(pid)
	return info.Process, err
}

// Alive reports whether exactly this process still runs. A zombie does not.
func (p Process) Alive() bool {
	if p.PID <= 0 {
		return false
	}
	info, err := readStat(p.PID)
	return err == nil && info.StartTime == p.StartTime && !info.Zombie
}

// Signal sends a signal to exactly this process. It is no error if the process has exited.
func (p Process) Signal(signal unix.Signal) error {
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("opening process %d: %w", p.PID, err)
	}
	defer func() { _ = unix.Close(fd) }()
	// The descriptor pins the process, so that a start time read now is that of the process we signal.
	if !p.Alive() {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, signal, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signaling process %d: %w", p.PID, err)
	}
	return nil
}

// Stop asks the process to end, waits up to grace, and then kills it. It returns when the process has exited.
func (p Process) Stop(ctx context.Context, grace time.Duration) error {
	if err := p.Signal(unix.SIGTERM); err != nil {
		return err
	}
	patient, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	if p.wait(patient) == nil {
		return nil
	}
	if err := p.Signal(unix.SIGKILL); err != nil {
		return err
	}
	return p.wait(ctx)
}

func (p Process) wait(ctx context.Context) error {
	return Poll(ctx, 20*time.Millisecond, func(context.Context) error {
		if p.Alive() {
			return fmt.Errorf("process %d still runs", p.PID)
		}
		return nil
	})
}

// Processes lists every process of the machine. Those that exit meanwhile are left out.
func Processes() ([]Info, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	var all []Info
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		info, err := readStat(pid)
		if err != nil {
			continue
		}
		dir := filepath.Join("/proc", entry.Name())
		if exe, err := os.Readlink(filepath.Join(dir, "exe")); err == nil {
			info.Exe = strings.TrimSuffix(exe, " (deleted)")
		}
		if raw, err := os.ReadFile(filepath.Join(dir, "cmdline")); err == nil && len(raw) > 0 {
			info.Args = strings.Split(strings.TrimSuffix(string(raw), "\x00"), "\x00")
		}
		if raw, err := os.ReadFile(filepath.Join(dir, "status")); err == nil {
			info.Nested = parseNested(string(raw))
		}
		if raw, err := os.ReadFile(filepath.Join(dir, "cgroup")); err == nil {
			info.Cgroups = parseCgroups(string(raw))
		}
		all = append(all, info)
	}
	return all, nil
}

// Family returns the members of all that match, with all their descendants, each once.
func Family(all []Info, match func(Info) bool) []Info {
	in := make(map[int]bool)
	for _, info := range all {
		if match(info) {
			in[info.PID] = true
		}
	}
	for grown := true; grown; {
		grown = false
		for _, info := range all {
			if !in[info.PID] && in[info.PPID] {
				in[info.PID], grown = true, true
			}
		}
	}
	return slices.DeleteFunc(slices.Clone(all), func(info Info) bool { return !in[info.PID] })
}

// InCgroup reports whether the process is in the cgroup or below it, in any hierarchy.
func (i Info) InCgroup(path string) bool {
	return slices.ContainsFunc(i.Cgroups, func(own string) bool {
		return own == path || strings.HasPrefix(own, path+"/")
	})
}

// SharesMounts reports whether the process sees the same mounts as this one.
func (i Info) SharesMounts() bool {
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return false
	}
	theirs, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(i.PID), "ns", "mnt"))
	return err == nil && own == theirs
}

func readStat(pid int) (Info, error) {
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return Info{}, fmt.Errorf("looking up process %d: %w", pid, err)
	}
	return parseStat(string(raw))
}

// parseStat reads /proc/PID/stat (proc_pid_stat(5)). The second field is the program's name in parentheses and may hold
// anything, blanks and parentheses too, so the fields are counted from the last closing one.
func parseStat(stat string) (Info, error) {
	open, end := strings.IndexByte(stat, '('), strings.LastIndexByte(stat, ')')
	if open < 0 || end < open {
		return Info{}, fmt.Errorf("parsing process stat %q: no program name", stat)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(stat[:open]))
	if err != nil {
		return Info{}, fmt.Errorf("parsing process stat: %w", err)
	}
	rest := strings.Fields(stat[end+1:])
	const state, ppid, startTime = 0, 1, 19 // fields 3, 4 and 22
	if len(rest) <= startTime {
		return Info{}, fmt.Errorf("parsing process stat %q: too short", stat)
	}
	info := Info{Process: Process{PID: pid}, Zombie: rest[state] == "Z" || rest[state] == "X"}
	if info.PPID, err = strconv.Atoi(rest[ppid]); err != nil {
		return Info{}, fmt.Errorf("parsing process stat: %w", err)
	}
	if info.StartTime, err = strconv.ParseUint(rest[startTime], 10, 64); err != nil {
		return Info{}, fmt.Errorf("parsing process stat: %w", err)
	}
	return info, nil
}

// parseNested reads /proc/PID/status, which lists the process's pid in each PID namespace from that of /proc on.
func parseNested(status string) bool {
	for line := range strings.Lines(status) {
		if pids, ok := strings.CutPrefix(line, "NSpid:"); ok {
			return len(strings.Fields(pids)) > 1
		}
	}
	return false
}

// parseCgroups reads /proc/PID/cgroup: lines of "hierarchy:controllers:path".
func parseCgroups(text string) []string {
	var paths []string
	for line := range strings.Lines(text) {
		if parts := strings.SplitN(strings.TrimSpace(line), ":", 3); len(parts) == 3 {
			paths = append(paths, parts[2])
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths)
}
