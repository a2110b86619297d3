package recovery

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// Standing is what is known of a create that an earlier call, of this process or a former one, began.
type Standing int

// The standings.
const (
	// Started: it is answered with its sandbox.
	Started Standing = iota
	// Unfinished: a former leader began it, and it has to be resumed before it is answered.
	Unfinished
	// Abandoned: it failed, and is being rolled back.
	Abandoned
	// Unsettled: all that is known of it is a container that may yet be deleted.
	Unsettled
	// Unadopted: all that is known of it is what its agent reports, and that would be lost with the agent.
	Unadopted
)

// StandingOf returns what is known of the create that made a sandbox.
func (r *Recoverer) StandingOf(item store.Item) Standing {
	switch {
	case r.Abandoned(item.Resource):
		return Abandoned
	case r.unsettled(item):
		return Unsettled
	case r.unadopted(item):
		return Unadopted
	case r.unfinished(item):
		return Unfinished
	}
	return Started
}

// unfinished reports whether the create that a former leader began still has to be seen through before it is answered. A
// strong one has, even if it has started: the process that began it may be stalled, and roll it back when it continues, until the
// mark of the one that resumed it stops it.
func (r *Recoverer) unfinished(item store.Item) bool {
	if item.Resource == nil {
		return false
	}
	phase := item.Sandbox.GetStatus().GetPhase()
	return phase == sandboxv1.Phase_PHASE_PENDING || phase == sandboxv1.Phase_PHASE_BOUND || !mayBeAnswered(item.Resource) || !resumed(item.Resource)
}

// unsettled reports whether all that is known of a sandbox is a container that may yet be deleted: by this process, for an
// earlier attempt started it and was not answered, or by a former leader that its agent would still obey.
func (r *Recoverer) unsettled(item store.Item) bool {
	if item.Resource != nil || item.Fence == nil {
		return false
	}
	fence := identity.FenceOf(item.Fence)
	// In this order: a container whose deletion has ended between the two looks was removed, whatever the item still shows.
	return r.config.Deletions.Deleting(fence) || r.config.Store.ContainerRemoved(fence) || !r.config.Announced(fence.AgentUID)
}

// unadopted reports whether a former leader's create is known only by its agent's report. Answering it would be a promise that this
// process cannot keep yet: it has nothing to write, should the agent's Pod be deleted.
func (r *Recoverer) unadopted(item store.Item) bool {
	if item.Resource != nil || item.Fence == nil || r.owned(identity.FenceOf(item.Fence)) {
		return false
	}
	// A write that has ended between the two looks has left a custom resource.
	now, known := r.config.Store.Get(item.Key)
	return !known || now.Resource == nil
}

// Resume marks a strong create that a former leader began as resumed, and returns its custom resource. That leader may still be
// about to roll it back: of the two marks, this one and that of a rollback, the first counts, for each is written over what
// was read.
func (r *Recoverer) Resume(ctx context.Context, key store.Key, resource *v1alpha1.Sandbox) (*v1alpha1.Sandbox, error) {
	if resumed(resource) {
		return resource, nil
	}
	ctx, cancel := context.WithTimeout(ctx, apiserver.CallTimeout)
	defer cancel()
	for {
		there := &v1alpha1.Sandbox{}
		err := r.config.API.Get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: key.Name}, there)
		switch {
		case apierrors.IsNotFound(err):
			return nil, RollingBack()
		case err != nil:
			return nil, apiserver.Unavailable(err)
		case !sameCall(there, resource), there.DeletionTimestamp != nil, r.Abandoned(there):
			return nil, RollingBack()
		case resumed(there):
			return there, nil
		}
		there.Annotations[v1alpha1.AnnotationResumed] = "true"
		if err = r.config.API.Update(ctx, there); err == nil {
			r.config.Store.SetResource(there.DeepCopy())
			return there, nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return nil, apiserver.Unavailable(err)
		}
	}
}

// Owner is whose custom resource has the name of one that was to be created.
type Owner int

// The owners.
const (
	// Another create's.
	Another Owner = iota
	// ThisCall: written by an earlier attempt of this call whose answer was lost.
	ThisCall
	// ThisRequest: written by a former leader for the same request.
	ThisRequest
	// RolledBack: the same request's, and being deleted.
	RolledBack
)

// OwnerOf returns whose custom resource is there instead of the one that is wanted; sent says that this call has sent one.
func (r *Recoverer) OwnerOf(there, want *v1alpha1.Sandbox, sent bool) Owner {
	switch {
	case sent && sameCall(there, want):
		return ThisCall
	case !sameRequest(there, want):
		return Another
	case there.DeletionTimestamp != nil || r.Abandoned(there):
		return RolledBack
	}
	return ThisRequest
}

// HasStarted reports whether the custom resource says that the process has started, be it in an earlier attempt. The next
// leader then knows that the caller may have been answered.
func HasStarted(sb *v1alpha1.Sandbox) bool {
	return sb.Status.StartTime != nil || sb.Status.Phase == v1alpha1.PhaseRunning || sb.Status.Attempt > 1
}

// mayBeAnswered reports whether a create's caller may have been answered with its sandbox. A fast one's custom resource is
// written after that.
func mayBeAnswered(sb *v1alpha1.Sandbox) bool {
	return sb.Spec.ConsistencyMode != v1alpha1.ConsistencyModeStrong || HasStarted(sb)
}

// resumed reports whether only the leader that resumed this strong create may roll it back. No process rolls a fast one back
// by its custom resource.
func resumed(sb *v1alpha1.Sandbox) bool {
	return sb.Spec.ConsistencyMode != v1alpha1.ConsistencyModeStrong || sb.Annotations[v1alpha1.AnnotationResumed] != ""
}

// sameRequest reports whether two custom resources are of one request_id.
func sameRequest(a, b *v1alpha1.Sandbox) bool {
	id := a.Annotations[v1alpha1.AnnotationRequestID]
	return id != "" && id == b.Annotations[v1alpha1.AnnotationRequestID] &&
		a.Annotations[v1alpha1.AnnotationRequestDigest] == b.Annotations[v1alpha1.AnnotationRequestDigest]
}

// sameCall reports whether two custom resources are of one create call.
func sameCall(a, b *v1alpha1.Sandbox) bool {
	return a.Annotations[v1alpha1.AnnotationCreateTime] == b.Annotations[v1alpha1.AnnotationCreateTime] &&
		a.Annotations[v1alpha1.AnnotationRequestID] == b.Annotations[v1alpha1.AnnotationRequestID] &&
		a.Annotations[v1alpha1.AnnotationRequestDigest] == b.Annotations[v1alpha1.AnnotationRequestDigest]
}

// callOf identifies the create call of a custom resource: of one name, one moment.
func callOf(sb *v1alpha1.Sandbox) string {
	return sb.Namespace + "/" + sb.Name + "/" + sb.Annotations[v1alpha1.AnnotationCreateTime]
}
