// Package host reads, from /proc, the machine that a benchmark runs on, and what processes cost on it. It
// only reads. All functions may be called concurrently.
package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

// procRoot is the kernel's directory of processes.
const procRoot = "/proc"

// Describe describes the machine. The caller adds the version of containerd.
func Describe(ctx context.Context) (report.Environment, error) {
	e := report.Environment{Cores: runtime.NumCPU(), Go: runtime.Version()}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return e, fmt.Errorf("asking for the kernel's version: %w", err)
	}
	e.Kernel = unix.ByteSliceToString(u.Release[:])
	raw, err := os.ReadFile(filepath.Join(procRoot, "cpuinfo"))
	if err != nil {
		return e, fmt.Errorf("reading the CPU's model: %w", err)
	}
	e.CPU = field(raw, "model name")
	memory, err := Memory()
	if err != nil {
		return e, err
	}
	e.MemoryMiB = int(memory.TotalBytes >> 20)
	if raw, err = os.ReadFile(filepath.Join(procRoot, "loadavg")); err != nil {
		return e, fmt.Errorf("reading the load: %w", err)
	}
	if _, err := fmt.Sscan(string(raw), &e.Load); err != nil {
		return e, fmt.Errorf("reading the load: %w", err)
	}
	// Without runc in PATH its version stays unknown.
	if out, err := exec.CommandContext(ctx, "runc", "--version").Output(); err == nil {
		line, _, _ := strings.Cut(string(out), "\n")
		e.Runc = strings.TrimPrefix(line, "runc version ")
	}
	return e, nil
}

// Commit names the sources in a folder; `-dirty` marks sources that were changed since.
func Commit(ctx context.Context, dir string) (string, error) {
	out, err := exec.CommandContext(ctx, "git", "-C", dir, "describe", "--always", "--dirty", "--abbrev=12").Output()
	if err != nil {
		return "", fmt.Errorf("asking git for the commit: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// field is the value of the first line `name : value`.
func field(raw []byte, name string) string {
	for line := range bytes.Lines(raw) {
		key, value, ok := strings.Cut(string(line), ":")
		if ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// kilobytes is the value of a line `name: 123 kB`, in bytes.
func kilobytes(raw []byte, name string) (int64, error) {
	value, _, _ := strings.Cut(field(raw, name), " ")
	n, err := strconv.ParseInt(value, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("reading %s: %w", name, err)
	}
	return n << 10, nil
}

// MemoryState is the machine's memory.
type MemoryState struct{ TotalBytes, AvailableBytes int64 }

// Memory reads the machine's memory.
func Memory() (MemoryState, error) {
	raw, err := os.ReadFile(filepath.Join(procRoot, "meminfo"))
	if err != nil {
		return MemoryState{}, fmt.Errorf("reading the memory's size: %w", err)
	}
	total, err := kilobytes(raw, "MemTotal")
	available, err2 := kilobytes(raw, "MemAvailable")
	return MemoryState{total, available}, errors.Join(err, err2)
}

// clockTick is the unit of times in /proc/PID/stat: 100 a second on every architecture that Linux has for Go.
const clockTick = 100

// Process is what a process has used.
type Process struct {
	Parent int
	// CPUSeconds is user and system time of all its threads, and of no child.
	CPUSeconds float64
	// RSSBytes is its resident memory, shared pages whole.
	RSSBytes int64
}

// ReadProcess reads what a process has used.
func ReadProcess(pid int) (Process, error) {
	raw, err := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(pid), "stat"))
	if err != nil {
		return Process{}, fmt.Errorf("reading process %d: %w", pid, err)
	}
	return ParseStat(raw)
}

// ParseStat reads /proc/PID/stat (proc(5)).
func ParseStat(raw []byte) (Process, error) {
	// The command's name, in parentheses, may hold blanks and parentheses itself.
	i := bytes.LastIndexByte(raw, ')')
	if i < 0 {
		return Process{}, errors.New("reading a process's state: no name in parentheses")
	}
	f := strings.Fields(string(raw[i+1:]))
	if len(f) < 22 {
		return Process{}, fmt.Errorf("reading a process's state: %d fields, want at least 22", len(f))
	}
	var numbers [4]int64
	for i, index := range []int{1, 11, 12, 21} { // ppid, utime, stime, rss: fields 4, 14, 15, 24
		n, err := strconv.ParseInt(f[index], 10, 64)
		if err != nil {
			return Process{}, fmt.Errorf("reading a process's state: %w", err)
		}
		numbers[i] = n
	}
	return Process{
		Parent: int(numbers[0]), CPUSeconds: float64(numbers[1]+numbers[2]) / clockTick, RSSBytes: numbers[3] * int64(os.Getpagesize()),
	}, nil
}

// CPUTime is the CPU time that all threads of a process have used, to the nanosecond: ReadProcess counts in hundredths of a
// second.
func CPUTime(pid int) (time.Duration, error) {
	// The clock of a process's CPU time (clock_getcpuclockid(3)): its number's complement, and 2 for the scheduler's count.
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|2), &t); err != nil {
		return 0, fmt.Errorf("reading the CPU time of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// PSS is a process's proportional set size in bytes: its own pages, and its share of those that others have, too.
func PSS(pid int) (int64, error) {
	raw, err := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(pid), "smaps_rollup"))
	if err != nil {
		return 0, fmt.Errorf("reading the memory of process %d: %w", pid, err)
	}
	return ParseRollup(raw)
}

// ParseRollup reads the PSS out of /proc/PID/smaps_rollup.
func ParseRollup(raw []byte) (int64, error) { return kilobytes(raw, "Pss") }
