package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// setting is one file of a cgroup.
type setting struct {
	controller, file, value string
	// optional: the kernel may lack it.
	optional bool
}

// Limit gives an existing cgroup the limits that the OCI runtime would have given it at its creation. It writes the cgroup's files itself:
// the runtime's update command costs as much as starting a container.
func (t *Tree) Limit(path string, r *specs.LinuxResources) error {
	for _, s := range settings(r, t.unified) {
		file := filepath.Join(t.root, s.controller, path, s.file)
		err := write(file, s.value)
		if s.optional && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("limiting cgroup %s: %w", path, err)
		}
	}
	return nil
}

// settings returns the files for the limits, in the order that the kernel requires.
func settings(r *specs.LinuxResources, one bool) []setting {
	if one {
		return settings2(r)
	}
	var out []setting
	add := func(controller, file string, value int64, optional bool) {
		out = append(out, setting{controller, file, strconv.FormatInt(value, 10), optional})
	}
	if c := r.CPU; c != nil {
		if c.Shares != nil {
			add("cpu", "cpu.shares", int64(min(*c.Shares, 262144)), false)
		}
		if c.Period != nil {
			add("cpu", "cpu.cfs_period_us", int64(*c.Period), false)
		}
		if c.Quota != nil {
			add("cpu", "cpu.cfs_quota_us", *c.Quota, false)
		}
	}
	if m := r.Memory; m != nil {
		if m.Limit != nil {
			add("memory", "memory.limit_in_bytes", *m.Limit, false)
		}
		if m.Swap != nil {
			add("memory", "memory.memsw.limit_in_bytes", *m.Swap, true)
		}
	}
	if p := r.Pids; p != nil && p.Limit != nil {
		add("pids", "pids.max", *p.Limit, false)
	}
	return out
}

func settings2(r *specs.LinuxResources) []setting {
	var out []setting
	add := func(file, value string, optional bool) { out = append(out, setting{"", file, value, optional}) }
	if c := r.CPU; c != nil {
		if c.Shares != nil {
			// Shares from 2 to 262144 become weights from 1 to 10000, as in OCI runtimes.
			add("cpu.weight", strconv.FormatUint(1+(min(max(*c.Shares, 2), 262144)-2)*9999/262142, 10), false)
		}
		if c.Quota != nil && c.Period != nil {
			add("cpu.max", fmt.Sprintf("%d %d", *c.Quota, *c.Period), false)
		}
	}
	if m := r.Memory; m != nil {
		if m.Limit != nil {
			add("memory.max", strconv.FormatInt(*m.Limit, 10), false)
		}
		if m.Swap != nil && m.Limit != nil {
			add("memory.swap.max", strconv.FormatInt(*m.Swap-*m.Limit, 10), true)
		}
	}
	if p := r.Pids; p != nil && p.Limit != nil {
		add("pids.max", strconv.FormatInt(*p.Limit, 10), false)
	}
	return out
}

// BoundCPU lowers a CPU limit, in thousandths of a core, to that of the cgroup above path. In a legacy hierarchy the kernel refuses a higher
// one; in the unified hierarchy that of the cgroup above applies in any case.
func (t *Tree) BoundCPU(millis int64, path string) int64 {
	if t.unified {
		return millis
	}
	above := filepath.Join(t.root, "cpu", filepath.Dir(path))
	read := func(file string) int64 {
		raw, err := os.ReadFile(filepath.Join(above, file))
		if err != nil {
			return 0
		}
		n, _ := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
		return n
	}
	quota, period := read("cpu.cfs_quota_us"), read("cpu.cfs_period_us")
	if quota <= 0 || period <= 0 {
		return millis
	}
	return min(millis, quota*1000/period)
}
