package containerd

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Shim is a process that executes a shim.
type Shim struct {
	PID  int
	Args []string
}

// Of reports whether the shim was started with a container.
func (s Shim) Of(id string) bool {
	at := slices.Index(s.Args, "-id")
	return at > 0 && at+1 < len(s.Args) && s.Args[at+1] == id
}

// Shims returns the shims that run on this machine, by the program that the kernel executes: what a process calls itself is its own word.
func Shims() []Shim {
	entries, _ := os.ReadDir("/proc")
	var out []Shim
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		exe, err := os.Readlink(filepath.Join("/proc", e.Name(), "exe"))
		if err != nil || !strings.HasPrefix(filepath.Base(exe), "containerd-shim") {
			continue
		}
		raw, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		out = append(out, Shim{pid, strings.Split(strings.TrimSuffix(string(raw), "\x00"), "\x00")})
	}
	return out
}
