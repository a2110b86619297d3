package ctrd

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
)

// strayTimeout is how long a removal waits for the end of processes.
const strayTimeout = 10 * time.Second

// strayPolls is the policy of checks whether they have ended.
var strayPolls = backoff.Policy{Initial: 30 * time.Millisecond, Max: 200 * time.Millisecond}

// removeStrays ends the processes of a container whose task containerd does not know, and removes its cgroup. When the client of
// a create ends before the create has, containerd cancels the create and may leave the shim, the OCI runtime and a process that
// is not completely started. It returns nil at once if the host's processes are not visible.
func (r *Remover) removeStrays(ctx context.Context, id, cgroup string) error {
	until, polls := r.clock().Now().Add(strayTimeout), backoff.New(r.clock(), strayPolls)
	for {
		left := slices.Concat(r.processes().strays(id), r.cgroups().members(cgroup))
		kill(left)
		r.cgroups().remove(cgroup)
		if len(left) == 0 && !r.cgroups().exists(cgroup) {
			return nil
		}
		if r.clock().Now().After(until) {
			return fmt.Errorf("ending the processes of container %s: %d are left: %w", id, len(left), errdefs.ErrUnavailable)
		}
		if err := polls.Wait(ctx); err != nil {
			return fmt.Errorf("ending the processes of container %s: %w", id, err)
		}
	}
}
