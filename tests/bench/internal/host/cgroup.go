package host

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Cgroups is the hierarchy of this machine that accounts CPU time: cpuacct of the legacy ones, or the unified one.
type Cgroups struct {
	root   string
	legacy bool
}

// FindCgroups finds the hierarchy.
func FindCgroups() (Cgroups, error) {
	raw, err := os.ReadFile(filepath.Join(procRoot, "mounts"))
	if err != nil {
		return Cgroups{}, fmt.Errorf("finding the cgroups: %w", err)
	}
	return ParseCgroups(raw)
}

// ParseCgroups reads /proc/mounts (fstab(5)). A machine in hybrid mode has both, and its containers are in the legacy hierarchies
// for certain.
func ParseCgroups(mounts []byte) (Cgroups, error) {
	var unified string
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if len(f) < 4 {
			continue
		}
		switch options := strings.Split(f[3], ","); {
		case f[2] == "cgroup" && slices.Contains(options, "cpuacct"):
			return Cgroups{root: f[1], legacy: true}, nil
		case f[2] == "cgroup2" && unified == "":
			unified = f[1]
		}
	}
	if unified == "" {
		return Cgroups{}, errors.New("finding the cgroups: no hierarchy accounts CPU time")
	}
	return Cgroups{root: unified}, nil
}

// Dir is the directory of a cgroup, given by its path below the hierarchy's root.
func (c Cgroups) Dir(path string) string { return filepath.Join(c.root, path) }

// CPU is the CPU time of all processes that are or were in a cgroup or in one below it, also of those that have ended and whose cgroup
// was removed since.
func (c Cgroups) CPU(path string) (time.Duration, error) {
	file := "cpu.stat"
	if c.legacy {
		file = "cpuacct.usage"
	}
	raw, err := os.ReadFile(filepath.Join(c.Dir(path), file))
	if err != nil {
		return 0, fmt.Errorf("reading the CPU time of cgroup %s: %w", path, err)
	}
	return ParseCPU(raw)
}

// ParseCPU reads cpuacct.usage (nanoseconds) or cpu.stat (usage_usec among others).
func ParseCPU(raw []byte) (time.Duration, error) {
	number, unit := string(bytes.TrimSpace(raw)), time.Nanosecond
	for line := range strings.Lines(number) {
		if value, ok := strings.CutPrefix(line, "usage_usec "); ok {
			number, unit = strings.TrimSpace(value), time.Microsecond
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("reading the CPU time of a cgroup: %w", err)
	}
	return time.Duration(n) * unit, nil
}

// Pods returns the cgroups of the Pods below a cgroup, by the uids of the Pods. The kubelet calls them pod and the uid, if its driver is cgroupfs.
func (c Cgroups) Pods(below string) (map[string]string, error) {
	root, pods := c.Dir("/"), map[string]string{}
	err := filepath.WalkDir(c.Dir(below), func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return nil //nolint:nilerr // a cgroup that was removed meanwhile is that of no Pod
		}
		if uid, ok := strings.CutPrefix(e.Name(), "pod"); ok && uid != "" {
			pods[uid] = "/" + strings.TrimPrefix(strings.TrimPrefix(path, root), "/")
			return fs.SkipDir
		}
		return nil
	})
	if err == nil && len(pods) == 0 {
		err = fmt.Errorf("no Pod has a cgroup below %s: is this the local cluster? %w", below, os.ErrNotExist)
	}
	return pods, err
}

// Members are the processes in a cgroup, without those below it.
func (c Cgroups) Members(path string) ([]int, error) {
	raw, err := os.ReadFile(filepath.Join(c.Dir(path), "cgroup.procs"))
	if err != nil {
		return nil, fmt.Errorf("listing the processes of cgroup %s: %w", path, err)
	}
	var out []int
	for _, f := range strings.Fields(string(raw)) {
		pid, err := strconv.Atoi(f)
		if err != nil {
			return nil, fmt.Errorf("listing the processes of cgroup %s: %w", path, err)
		}
		out = append(out, pid)
	}
	return out, nil
}

// Program is the base name of the file that a process executes, and its arguments. Both are empty if the process has ended.
func Program(pid int) (name string, args []string) {
	dir := filepath.Join(procRoot, strconv.Itoa(pid))
	exe, err := os.Readlink(filepath.Join(dir, "exe"))
	if err != nil {
		return "", nil
	}
	raw, err := os.ReadFile(filepath.Join(dir, "cmdline"))
	if err != nil {
		return "", nil
	}
	return filepath.Base(strings.TrimSuffix(exe, " (deleted)")), strings.Split(strings.TrimSuffix(string(raw), "\x00"), "\x00")
}
