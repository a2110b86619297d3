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

// lostAgent is the agent uid in the records that endLost creates. No Pod has such a uid, so a record that is left by a crash is
// an orphan like any other.
const lostAgent = "lost-record"

// endLost ends the task of a container that has no record, if containerd still runs one. Nothing else is killed: other
// processes of that name belong to another containerd. containerd does not delete a task without a record, so the task gets a
// temporary one. Killing only the process would leave the task, its bundle, the OCI runtime's state and, for a slot, its shim.
func (r *Remover) endLost(ctx context.Context, id string) error {
	// The parts of one container are removed concurrently.
	_, err, _ := r.lost.Do(id, func() (any, error) { return nil, r.endLostOnce(ctx, id) })
	return err
}

func (r *Remover) endLostOnce(ctx context.Context, id string) error {
	known, err := r.tasks().ids(ctx)
	if err != nil || !known[id] {
		return err
	}
	path := r.cgroups().all()[id]
	if err := r.tasks().createRecord(ctx, id, path); err != nil {
		return err
	}
	_, err = r.tasks().remove(ctx, id)
	if err == nil {
		err = r.removeStrays(ctx, id, path)
	}
	if err != nil {
		return err // the record stays for the next attempt
	}
	step, cancel := r.step(ctx)
	defer cancel()
	if err := r.Client.ContainerService().Delete(step, id); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("removing the temporary record of task %s: %w", id, err)
	}
	return nil
}

// createRecord creates a temporary record for a task that has none.
func (s *taskSet) createRecord(ctx context.Context, id, cgroup string) error {
	var described spec
	described.Linux.CgroupsPath = cgroup
	raw, err := json.Marshal(described)
	if err != nil {
		return fmt.Errorf("encoding the temporary record of task %s: %w", id, err)
	}
	step, cancel := s.step(ctx)
	defer cancel()
	_, err = s.client.ContainerService().Create(step, containers.Container{
		ID: id, Labels: identity.Identity{AgentUID: lostAgent, State: identity.StateSlot}.Labels(),
		Runtime: containers.RuntimeInfo{Name: "io.containerd.runc.v2"}, Spec: &anypb.Any{TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/Spec", Value: raw},
	})
	if errdefs.IsAlreadyExists(err) { // another component creates the container concurrently
		return fmt.Errorf("creating a temporary record for task %s: %w: %w", id, errdefs.ErrUnavailable, err)
	}
	if err != nil {
		return fmt.Errorf("creating a temporary record for task %s: %w", id, err)
	}
	return nil
}
