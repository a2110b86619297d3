package mesh

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Executing returns the processes on the node that execute a program, by its path in its container.
func Executing(program string) (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if exe, err := os.Readlink(filepath.Join("/proc", e.Name(), "exe")); err == nil && exe == program {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Resident returns the largest resident memory of a process on the node that executes a program; 0 if none does.
func Resident(program string) (most int64) {
	for _, pid := range Executing(program) {
		raw, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
		for line := range strings.Lines(string(raw)) {
			if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
				kib, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
				most = max(most, kib<<10)
			}
		}
	}
	return most
}
