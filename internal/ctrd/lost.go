package ctrd

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// lostAgent is the agent that a record names which endLost makes. No Pod has such a uid, so that what is left of it by somebody
// who dies in the middle is an orphan like any other.
const lostAgent = "lost-record"

// endLost ends what containerd still runs as a task of a container that has no record. Nothing else is killed: what else may
// run under such a name is another containerd's. containerd deletes no task without a record, so the task gets one for that
// long: a process that is merely killed would leave a task, its bundle, the OCI runtime's state of it, and, of a slot, the shim
// that serves it for ever.
func (r *Remover) endLost(ctx context.Context, id string) error {
	// Of one container, the parts are removed side by side.
	_, err, _ := r.lost.Do(id, func() (any, error) { return nil, r.endLostOnce(ctx, id) })
	return err
}

func (r *Remover) endLostOnce(ctx context.Context, id string) error {
	known, err := r.taskIDs(ctx)
	if err != nil || !known[id] {
		return err
	}
	path := r.cgroups()[id]
	if err := r.lend(ctx, id, path); err != nil {
		return err
	}
	_, err = r.removeTask(ctx, id)
	if err == nil {
		err = r.removeStrays(ctx, id, "", path)
	}
	if err != nil {
		return err // the record stays, for whoever goes on with it
	}
	step, cancel := r.step(ctx)
	defer cancel()
	if err := r.Client.ContainerService().Delete(step, id); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("removing the record lent to task %s: %w", id, err)
	}
	return nil
}

// lend makes a record for a task that has none.
func (r *Remover) lend(ctx context.Context, id, cgroup string) error {
	var s spec
	s.Linux.CgroupsPath = cgroup
	raw, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("encoding the record lent to task %s: %w", id, err)
	}
	step, cancel := r.step(ctx)
	defer cancel()
	_, err = r.Client.ContainerService().Create(step, containers.Container{
		ID: id, Labels: identity.Identity{AgentUID: lostAgent, State: identity.StateSlot}.Labels(),
		Runtime: containers.RuntimeInfo{Name: "io.containerd.runc.v2"}, Spec: &anypb.Any{TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/Spec", Value: raw},
	})
	if errdefs.IsAlreadyExists(err) { // somebody creates it in this moment
		return fmt.Errorf("lending a record to task %s: %w: %w", id, errdefs.ErrUnavailable, err)
	}
	if err != nil {
		return fmt.Errorf("lending a record to task %s: %w", id, err)
	}
	return nil
}
