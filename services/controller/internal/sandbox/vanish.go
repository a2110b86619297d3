package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// leftBehind has the container ended of a sandbox whose resource is gone though this controller has not let it go; there is
// the uid of the one that has its name now, or empty. A finalizer does not hold a resource whose deletion began before it
// was written: the API server decides by what it read first that the resource may go at once, and then deletes whatever
// that has become, the assignment and a running container included. What was created on the fast path has had its
// finalizer from the first; such a resource is missed by the janitor, who takes his time.
func (r *Reconciler) leftBehind(ctx context.Context, name types.NamespacedName, there string) error {
	h := r.ops.holds(name)
	if h == nil || h.SandboxUID == there {
		return nil
	}
	var live v1alpha1.Sandbox
	switch err := r.Live.Get(ctx, name, &live); {
	case err != nil && !apierrors.IsNotFound(err):
		return fmt.Errorf("looking whether a sandbox is gone: %w", err)
	case err == nil && live.EffectiveUID() == h.SandboxUID:
		return nil // the cache has not seen it yet, or not any more
	}
	logr.FromContextOrDiscard(ctx).Info("a sandbox is gone that nobody let go; its container is ended",
		"sandboxUID", h.SandboxUID, "attempt", h.Attempt, "agent", h.AgentPod)
	r.ops.forget(name)
	r.ops.beside(ctx, func(ctx context.Context) { r.endLeft(ctx, name.Namespace, *h) })
	return nil
}

// endLeft asks for the end of a container until the agent says that it is gone, or the agent's Pod is.
func (r *Reconciler) endLeft(ctx context.Context, namespace string, h held) {
	fence := &agentv1.Fence{SandboxUid: h.SandboxUID, Attempt: h.Attempt, AgentUid: h.AgentUID}
	log := logr.FromContextOrDiscard(ctx).WithValues("sandboxUID", h.SandboxUID, "attempt", h.Attempt, "agent", h.AgentPod)
	for {
		err := r.deleteWithin(ctx, h.grace, r.addressNow(h.AgentUID, h.AgentAddress), fence, func(string) {})
		if err == nil {
			if err := r.giveUp(ctx, fence); err != nil { // the Registry hears of the container's end from the agent, too
				log.V(2).Info("place not released", "err", err.Error())
			}
			return
		}
		if gone, goneErr := r.agentGone(ctx, namespace, h.Assignment); goneErr == nil && gone {
			return
		}
		log.Info("ending a container that was left behind; trying on", "err", err.Error())
		select {
		case <-ctx.Done():
			return
		case <-time.After(r.Timing.Requeue):
		}
	}
}
