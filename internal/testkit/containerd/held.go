package containerd

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// held returns what this process, in which a test may run an agent, holds of the kernel beyond its memory: mounts that are attached nowhere,
// namespaces, and threads in another network namespace.
func held() []string {
	mounts := map[string]bool{}
	for _, l := range lines("/proc/self/mountinfo") {
		id, _, _ := strings.Cut(l, " ")
		mounts[id] = true
	}
	var out []string
	fds, _ := os.ReadDir("/proc/self/fd")
	for _, fd := range fds {
		link, err := os.Readlink(filepath.Join("/proc/self/fd", fd.Name()))
		if err != nil {
			continue // that of the directory
		}
		switch kind, _, _ := strings.Cut(link, ":["); {
		case slices.Contains([]string{"net", "user", "mnt", "pid", "uts", "ipc", "cgroup"}, kind):
			out = append(out, "namespace "+link)
		case strings.HasPrefix(link, "/") && !strings.HasPrefix(link, "/memfd:") && !mounts[mountOf(fd.Name())]:
			out = append(out, "mount, which is attached nowhere, with "+link)
		}
	}
	own, _ := os.Readlink("/proc/self/ns/net") // of the first thread, which no test moves
	threads, _ := filepath.Glob("/proc/self/task/*/ns/net")
	for _, path := range threads {
		if link, err := os.Readlink(path); err == nil && link != own {
			out = append(out, fmt.Sprintf("thread in network namespace %s", link))
		}
	}
	return out
}

// mountOf returns the id of the mount that an open file is in.
func mountOf(fd string) string {
	for _, l := range lines("/proc/self/fdinfo/" + fd) {
		if id, ok := strings.CutPrefix(l, "mnt_id:"); ok {
			return strings.TrimSpace(id)
		}
	}
	return ""
}

// inits returns the files of sandbox-init that agents have installed for this server.
func (s *Server) inits() []os.FileInfo {
	var out []os.FileInfo
	paths, _ := filepath.Glob(filepath.Join(s.Dir, "slots", "*", "sandbox-init"))
	for _, path := range paths {
		if info, err := os.Stat(path); err == nil {
			out = append(out, info)
		}
	}
	return out
}

// executes reports whether a process executes one of the files.
func executes(pid string, files []os.FileInfo) bool {
	exe, err := os.Stat(filepath.Join("/proc", pid, "exe"))
	return err == nil && slices.ContainsFunc(files, func(f os.FileInfo) bool { return os.SameFile(f, exe) })
}

// inCgroup reports whether a process is in a cgroup below a path.
func inCgroup(pid, path string) bool {
	return slices.ContainsFunc(lines(filepath.Join("/proc", pid, "cgroup")), func(l string) bool {
		return strings.Contains(l, ":"+path+"/") || strings.HasSuffix(l, ":"+path)
	})
}
