package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// maxSteps bounds the events that one reconcile follows; a whole life has fewer.
const maxSteps = 8

// pass is one reconcile of one sandbox.
type pass struct {
	*Reconciler

	now  time.Time
	name types.NamespacedName
	// sandbox is the working copy; base is what the API server has.
	sandbox, base *v1alpha1.Sandbox
	// assignment is the one in force, or nil.
	assignment *v1alpha1.Assignment
	// reason and message say why the sandbox is as it is, for the conditions; set by whoever knows.
	reason, message string
	// lost tells that the agent is held lost; removed that the container is known to be gone; refused that the request
	// itself was, before it came to an agent.
	lost, removed, refused bool
	// leaving tells that the container is to go; hindrance is the reason that it does not.
	leaving   bool
	hindrance string
	// warned tells that an Event has told the reason already.
	warned bool
	// unplaced is the reason that no place was found for.
	unplaced string
	// requeue is when to look again; zero for never.
	requeue time.Duration
	// finalized tells that there is nothing left to write a status to.
	finalized bool
}

func (r *Reconciler) newPass(s *v1alpha1.Sandbox) *pass {
	return &pass{Reconciler: r, now: r.Clock.Now(), name: client.ObjectKeyFromObject(s), sandbox: s.DeepCopy(), base: s.DeepCopy()}
}

// run follows events until none has anything to say or something has to be waited for, and then writes the status.
func (p *pass) run(ctx context.Context) (reconcile.Result, error) {
	err := p.advance(ctx)
	if p.finalized {
		p.ops.forget(p.name)
		return reconcile.Result{}, err
	}
	if !behind(err) {
		err = errors.Join(err, p.writeStatus(ctx))
	}
	if behind(err) { // the cache is; it will show what was missed
		return reconcile.Result{RequeueAfter: cacheDelay}, nil
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{RequeueAfter: p.requeue}, nil
}

// behind tells that the resource is another one by now, or is gone, perhaps to be created anew under the same name.
func behind(err error) bool { return apierrors.IsConflict(err) || apierrors.IsNotFound(err) }

func (p *pass) advance(ctx context.Context) error {
	var err error
	if p.assignment, err = p.sandbox.Assignment(); err != nil {
		// Somebody may run there: nothing can be done, not even deleting, until the annotation is put right.
		p.explain("AssignmentInvalid", err.Error())
		p.hindrance = p.reason
		p.after(p.Timing.Requeue)
		return nil
	}
	if p.sandbox.DeletionTimestamp == nil && controllerutil.AddFinalizer(p.sandbox, v1alpha1.Finalizer) {
		if err := p.writeMetadata(ctx); err != nil {
			return fmt.Errorf("adding finalizer: %w", err)
		}
	}
	if p.sandbox.DeletionTimestamp != nil && !controllerutil.ContainsFinalizer(p.sandbox, v1alpha1.Finalizer) {
		p.finalized = true
		return nil
	}
	p.begin()
	p.removeStale(ctx)
	for range maxSteps {
		event, ok, err := p.observe(ctx)
		if err != nil || !ok {
			return err
		}
		phase, actions, ok := lifecycle.Next(p.state(), event)
		if !ok {
			return nil
		}
		moved := p.enter(ctx, phase, event)
		done, err := p.act(ctx, event, actions)
		if err != nil || !done || p.finalized || !moved && len(actions) == 0 {
			return err
		}
	}
	p.after(cacheDelay)
	return nil
}

// begin fills what every status has from the first.
func (p *pass) begin() {
	st := &p.sandbox.Status
	if st.Phase == "" && st.AcceptedResetRevision == nil {
		st.AcceptedResetRevision = p.sandbox.Spec.ResetRevision // one that it was born with asks for nothing
	}
	if p.assignment != nil {
		st.Attempt = max(st.Attempt, p.assignment.Attempt)
		st.AssignedPod, st.NodeName = p.assignment.AgentPod, p.assignment.NodeName
		if p.sandbox.Annotations[v1alpha1.AnnotationSandboxUID] == "" {
			p.ops.hold(p.name, *p.assignment, p.grace())
		}
	}
}

func (p *pass) state() lifecycle.State {
	return lifecycle.State{
		Phase: lifecycle.Phase(p.sandbox.Status.Phase), Assigned: p.assignment != nil,
		Finished: p.sandbox.Status.Phase == v1alpha1.PhaseRunning &&
			meta.IsStatusConditionTrue(p.sandbox.Status.Conditions, v1alpha1.ConditionFinished),
	}
}

// enter moves the working copy into a phase and tells whether it was in another. Gone is no phase that is written.
func (p *pass) enter(ctx context.Context, phase lifecycle.Phase, event lifecycle.Event) bool {
	if phase == lifecycle.Gone || string(phase) == string(p.sandbox.Status.Phase) {
		return phase == lifecycle.Gone
	}
	logr.FromContextOrDiscard(ctx).Info("phase changes", "from", p.sandbox.Status.Phase, "to", phase, "event", event.String())
	p.sandbox.Status.Phase = v1alpha1.Phase(phase)
	if phase == lifecycle.Pending {
		p.forgetEnd()
	}
	return true
}

func (p *pass) fence() *agentv1.Fence {
	return &agentv1.Fence{SandboxUid: p.assignment.SandboxUID, Attempt: p.assignment.Attempt, AgentUid: p.assignment.AgentUID}
}

func (p *pass) key(kind opKind) opKey {
	return opKey{kind, p.assignment.SandboxUID, p.assignment.Attempt, p.assignment.AgentUID}
}

// after asks for another look no later than in d.
func (p *pass) after(d time.Duration) {
	if p.requeue == 0 || d < p.requeue {
		p.requeue = max(d, time.Millisecond)
	}
}

func (p *pass) explain(reason, message string) { p.reason, p.message = reason, message }

// writeMetadata writes finalizers, annotations and labels of the working copy, against the version that was read.
func (p *pass) writeMetadata(ctx context.Context) error {
	next := p.sandbox.DeepCopy()
	next.Status = p.base.Status
	if err := p.Client.Patch(ctx, next, client.MergeFromWithOptions(p.base, client.MergeFromWithOptimisticLock{})); err != nil {
		return err
	}
	p.ops.overwritten(p.name, p.base.ResourceVersion)
	p.base.ObjectMeta = *next.ObjectMeta.DeepCopy()
	p.sandbox.ObjectMeta = *next.ObjectMeta.DeepCopy()
	return nil
}

// writeStatus writes the status if it changed, and Events for what changed in it.
func (p *pass) writeStatus(ctx context.Context) error {
	p.conclude()
	if equality.Semantic.DeepEqual(p.base.Status, p.sandbox.Status) {
		return nil
	}
	ctx, span := obs.Tracer().Start(p.linked(ctx), "sandbox.status")
	defer span.End()
	next := p.sandbox.DeepCopy()
	patch := client.MergeFromWithOptions(p.base, client.MergeFromWithOptimisticLock{})
	if err := p.Client.Status().Patch(ctx, next, patch); err != nil {
		return fmt.Errorf("writing status: %w", err)
	}
	p.ops.overwritten(p.name, p.base.ResourceVersion)
	p.announce()
	return nil
}
