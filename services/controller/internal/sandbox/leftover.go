package sandbox

import (
	"context"
	"fmt"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// leftovers removes containers of Sandboxes that were removed in spite of their finalizer. The API server decides from the
// version that it has read whether a deletion has to wait for a finalizer. If the finalizer and the assignment are written
// between that and the deletion, both are deleted and the container keeps running. Resources of the fast path have their
// finalizer from the start. The janitor would remove such a container, too, but only after its grace.
type leftovers struct {
	live       client.Reader
	deleter    *deleter
	allocator  allocatorv1.AllocatorServiceClient
	background *background
	memory     *memory
	timing     Timing
	clock      clock.Clock
	forget     func(types.NamespacedName)
}

// collect removes the container that this process remembers for a name, if its Sandbox does not exist. current is the uid of
// the Sandbox that has the name in the cache, or empty.
func (l *leftovers) collect(ctx context.Context, name types.NamespacedName, current string) error {
	h := l.memory.holds.get(name)
	if h.SandboxUID == "" || h.SandboxUID == current {
		return nil
	}
	var live v1alpha1.Sandbox
	switch err := l.live.Get(ctx, name, &live); {
	case err != nil && !apierrors.IsNotFound(err):
		return fmt.Errorf("reading sandbox: %w", err)
	case err == nil && live.EffectiveUID() == h.SandboxUID:
		return nil // the cache is outdated
	}
	fence := fenceOf(h.Assignment)
	logr.FromContextOrDiscard(ctx).Info("sandbox was removed before its container", obs.KeyFence, fence.String(), obs.KeyAgent, h.AgentPod)
	l.forget(name)
	l.background.run(ctx, func(ctx context.Context) { l.remove(ctx, name, h, fence) })
	return nil
}

// remove deletes the container, until the agent has reported its removal or the agent's Pod does not exist.
func (l *leftovers) remove(ctx context.Context, name types.NamespacedName, h hold, fence identity.Fence) {
	log := logr.FromContextOrDiscard(ctx).WithValues(obs.KeyFence, fence.String(), obs.KeyAgent, h.AgentPod)
	err := backoff.Retry(ctx, l.clock, backoff.Policy{Initial: l.timing.Requeue, Max: 2 * l.timing.Requeue}, func(ctx context.Context) error {
		err := l.deleter.delete(ctx, l.deleter.agents.address(ctx, name.Namespace, fence, &h.Assignment), fence, h.grace, func(string) {})
		if err == nil {
			if err := releaseReservation(ctx, l.allocator, fence); err != nil { // the Registry also learns from the agent
				log.V(2).Info("reservation not released", obs.KeyError, err.Error())
			}
			return nil
		}
		if gone, goneErr := l.deleter.agents.podGone(ctx, name.Namespace, h.Assignment); goneErr == nil && gone {
			return nil
		}
		log.Info("container of removed sandbox not deleted", obs.KeyError, err.Error())
		return err
	})
	if err != nil && ctx.Err() == nil {
		log.Error(err, "deleting container of removed sandbox")
	}
}
