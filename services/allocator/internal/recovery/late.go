package recovery

import (
	"context"
	"errors"

	"github.com/go-logr/logr"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// ResourceSeen takes a custom resource from the informer. One whose sandbox was deleted before it was seen for the first
// time is a write that landed late, and one that is marked as abandoned is deleted by the process that marked it, unless
// that ended in between: the leader deletes both, at once or when it comes to lead.
func (r *Recoverer) ResourceSeen(sb *v1alpha1.Sandbox) {
	r.config.Store.SetResource(sb)
	r.checkLate(sb)
}

// ResourceOutlined takes the metadata of a custom resource that existed when this process started. All but its spec and status is known
// by them, so that it counts as any other.
func (r *Recoverer) ResourceOutlined(sb *v1alpha1.Sandbox) {
	r.config.Store.SetOutline(sb)
	r.checkLate(sb)
}

func (r *Recoverer) checkLate(sb *v1alpha1.Sandbox) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if sb.DeletionTimestamp != nil || !store.Abandoned(sb) && !r.config.Store.Gone(store.KeyOf(sb), sb.EffectiveUID()) {
		delete(r.late, sb.UID)
		return
	}
	r.late[sb.UID] = sb
	if r.config.Leads() {
		r.deleteLate(sb)
	}
}

// ResourceGone takes the removal of a custom resource from the informer.
func (r *Recoverer) ResourceGone(sb *v1alpha1.Sandbox) {
	r.config.Store.RemoveResource(sb)
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.late, sb.UID)
}

// sweepLate has the late and abandoned custom resources deleted that are left from a time without a leader.
func (r *Recoverer) sweepLate() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, sb := range r.late {
		r.deleteLate(sb)
	}
}

// deleteLate deletes a late or abandoned custom resource in the background. mu is held.
func (r *Recoverer) deleteLate(sb *v1alpha1.Sandbox) {
	r.config.Tasks.Go(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, sweepInterval) // the next sweep tries again
		defer cancel()
		if err := r.config.API.DeleteByUID(ctx, sb); err != nil && !errors.Is(err, context.Canceled) {
			logr.FromContextOrDiscard(ctx).Info("deleting a custom resource without a sandbox failed",
				obs.KeySandbox, sb.Namespace+"/"+sb.Name, obs.KeyError, err.Error())
		}
	})
}
