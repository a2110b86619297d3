package ctrd

import (
	"context"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
)

// removeStrays ends the processes of a container whose task containerd does not know, and removes its cgroup. When the client of
// a create ends before the create has, containerd cancels the create and may leave the shim, the OCI runtime and a process that
// is not completely started. It returns nil at once if the host's processes are not visible.
func (r *Remover) removeStrays(ctx context.Context, id, cgroup string) error {
	until := r.clock().Now().Add(strayTimeout)
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
		select {
		case <-ctx.Done():
			return fmt.Errorf("ending the processes of container %s: %w", id, ctx.Err())
		case <-r.clock().After(strayInterval):
		}
	}
}
