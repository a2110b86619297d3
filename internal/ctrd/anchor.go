package ctrd

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// NoPod is the owner of the shims of an agent that is in no Pod.
const NoPod = "none"

// idleShims returns the shims of ours that no container is in: their anchors, and records of containerd's sandbox store that lack one. The
// anchors are read before the containers: a container that joins a shim has its record before it joins, and a shim that is started
// afterwards is not in the list.
func (r *Remover) idleShims(ctx context.Context) ([]Piece, error) {
	anchors, err := r.anchors(ctx)
	if len(anchors) == 0 {
		return nil, err
	}
	used, usedErr := r.usedShims(ctx)
	if usedErr != nil {
		return nil, errors.Join(err, usedErr)
	}
	var out []Piece
	for id, owner := range anchors {
		if !used[id] {
			out = append(out, Piece{ID: id, Part: PartShim, Owner: owner})
		}
	}
	return out, err
}

// anchors returns the owners of all shims of ours that containerd knows. An error comes with those that were found.
func (r *Remover) anchors(ctx context.Context) (map[string]string, error) {
	step, cancel := r.step(ctx)
	defer cancel()
	out := map[string]string{}
	add := func(id string, labels map[string]string) {
		owner, ok := labels[identity.KeyShim]
		if !ok || !identity.IsShimID(id) {
			return
		}
		if owner == NoPod {
			owner = "" // the end of such an agent cannot be observed
		}
		out[id] = owner
	}
	filter := fmt.Sprintf("labels.%q", identity.KeyShim)
	list, err := r.Client.ContainerService().List(step, filter)
	if err != nil {
		return nil, fmt.Errorf("listing shims: %w", err)
	}
	for _, c := range list {
		add(c.ID, c.Labels)
	}
	records, err := r.Client.SandboxStore().List(step, filter)
	if errdefs.IsNotImplemented(err) { // containerd before 1.7, which no shim of ours works with
		return out, nil
	}
	if err != nil {
		return out, fmt.Errorf("listing the records of shims: %w", err)
	}
	for _, s := range records {
		add(s.ID, s.Labels)
	}
	return out, nil
}

// usedShims returns the shims that containers name, in either of the two places that they name it in.
func (r *Remover) usedShims(ctx context.Context) (map[string]bool, error) {
	step, cancel := r.step(ctx)
	defer cancel()
	list, err := r.Client.ContainerService().List(step)
	if err != nil {
		return nil, fmt.Errorf("listing the containers of shims: %w", err)
	}
	used := map[string]bool{}
	for _, c := range list {
		used[c.SandboxID] = true
		if c.Spec != nil {
			used[parseSpec(c.Spec.GetValue()).Annotations[GroupAnnotation]] = true
		}
	}
	return used, nil
}

// removeShim ends a shim of ours, and removes its anchor and its record, unless a container has joined it meanwhile.
func (r *Remover) removeShim(ctx context.Context, id string) error {
	used, err := r.usedShims(ctx)
	if err != nil {
		return err
	}
	if used[id] {
		return fmt.Errorf("ending shim %s, which has a container: %w", id, errdefs.ErrFailedPrecondition)
	}
	return r.removeAnchor(ctx, id)
}
