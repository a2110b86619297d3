package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
)

const killInterval = 50 * time.Millisecond

// task is one container that containerd has, or had, a shim for.
type task struct{ namespace, id string }

// remains is what a cluster leaves outside of its own directories. It must be collected before anything is removed.
type remains struct {
	tasks []task
	// cgroups are those of containers outside of the cluster's own tree.
	cgroups []string
}

// findRemains reads containerd's task directories, which list every container even if containerd does not run.
func findRemains(c components.Config) remains {
	var rest remains
	dirs, _ := filepath.Glob(filepath.Join(c.ContainerdState(), "io.containerd.runtime.v2.task", "*", "*"))
	for _, dir := range dirs {
		rest.tasks = append(rest.tasks, task{namespace: filepath.Base(filepath.Dir(dir)), id: filepath.Base(dir)})
		var spec struct {
			Linux struct {
				CgroupsPath string `json:"cgroupsPath"`
			} `json:"linux"`
		}
		raw, err := os.ReadFile(filepath.Join(dir, "config.json"))
		if err != nil || json.Unmarshal(raw, &spec) != nil {
			continue
		}
		rest.note(spec.Linux.CgroupsPath)
	}
	return rest
}

// note remembers a container's cgroup if it is outside of the cluster's tree.
func (r *remains) note(cgroup string) {
	cgroup = path.Clean("/" + cgroup)
	own := cgroup == components.RootCgroup || strings.HasPrefix(cgroup, components.RootCgroup+"/")
	if cgroup != "/" && !own && !slices.Contains(r.cgroups, cgroup) {
		r.cgroups = append(r.cgroups, cgroup)
	}
}

// ours reports whether a process belongs to the cluster by itself: it is in the cluster's cgroup, or it is a shim of the
// cluster's containerd, wherever it was put. Its descendants belong to the cluster too. A container that executes a program of
// the shim's name does not.
func ours(c components.Config, info host.Info) bool {
	if info.InCgroup(components.RootCgroup) {
		return true
	}
	if info.Nested || filepath.Base(info.Exe) != "containerd-shim-runc-v2" {
		return false
	}
	i := slices.Index(info.Args, "-address")
	return i >= 0 && i+1 < len(info.Args) && info.Args[i+1] == c.ContainerdSocket()
}

// killAll kills every process of the cluster and returns when none is left. It repeats, to find processes that were started
// meanwhile.
func killAll(ctx context.Context, c components.Config, rest remains) error {
	cgroups, err := host.FindCgroups()
	if err != nil {
		return err
	}
	return host.Poll(ctx, killInterval, func(context.Context) error {
		all, err := host.Processes()
		if err != nil {
			return host.Permanent(err)
		}
		family := host.Family(all, func(info host.Info) bool { return ours(c, info) })
		callers := ancestors(all, os.Getpid())
		family = slices.DeleteFunc(family, func(info host.Info) bool { return callers[info.PID] || info.Zombie })
		if len(family) == 0 {
			return nil
		}
		// A process in a frozen cgroup (v1) cannot be killed.
		cgroups.Thaw(append([]string{components.RootCgroup}, rest.cgroups...)...)
		for _, info := range family {
			if err := info.Signal(unix.SIGKILL); err != nil {
				return host.Permanent(err)
			}
		}
		return fmt.Errorf("%d processes still run, one is %d %v", len(family), family[0].PID, family[0].Args)
	})
}

// ancestors returns the process, its parent, and so on: the caller of `down` must survive it.
func ancestors(all []host.Info, pid int) map[int]bool {
	parents := make(map[int]int, len(all))
	for _, info := range all {
		parents[info.PID] = info.PPID
	}
	found := make(map[int]bool)
	for ; pid > 0 && !found[pid]; pid = parents[pid] {
		found[pid] = true
	}
	return found
}
