// Command containerd-shim-fsb-member-v1 is the runtime that records of containers name that join a shim of ours. containerd executes it for one purpose, after
// each of them: to delete what is left of the container if its shim is gone. Mostly nothing is, because the shim has deleted the
// container, and left the answer in the bundle. Otherwise, and for all else, containerd-shim-fsb-v1 beside it is executed.
//
// It exists for the time that it takes to start, a quarter of that of the shim, and imports next to nothing for that reason.
package main

import (
	"os"
	"path/filepath"
	"syscall"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/bundle"
)

const shim = "containerd-shim-fsb-v1"

func main() {
	if os.Args[len(os.Args)-1] == "delete" {
		if answer, err := os.ReadFile(bundle.Deleted); err == nil && len(answer) > 0 { // an empty one is of a shim that was killed
			if _, err := os.Stdout.Write(answer); err != nil {
				os.Exit(1)
			}
			return
		}
	}
	self, err := os.Executable()
	if err == nil {
		path := filepath.Join(filepath.Dir(self), shim)
		err = syscall.Exec(path, append([]string{path}, os.Args[1:]...), syscall.Environ()) //nolint:gosec // the shim, beside this program; it gets all that containerd said
	}
	_, _ = os.Stderr.WriteString(shim + ": " + err.Error() + "\n")
	os.Exit(1)
}
