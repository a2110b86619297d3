package load

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/utils/clock"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/plan"
)

const (
	// createLimit is how long a create is repeated. Other calls must have an answer in the end.
	createLimit = 45 * time.Second
	otherLimit  = 3 * time.Minute
	// Label is the label that updates set.
	Label = "chaos"
	// recovery is the recovery timeout of sandboxes with the policy AutoRecreate.
	recovery = 5 * time.Second
	grace    = 2 * time.Second
)

// Runner runs lives.
type Runner struct {
	// Clients are used in turn: they represent several programs, whose connections lead to different servers.
	Clients []sandboxv1.SandboxServiceClient
	Log     *Log
	Clock   clock.WithTicker
	// Namespace, Pool and Image of the sandboxes; Prefix begins all their names and request ids.
	Namespace, Pool, Image, Prefix string
}

// process is a life in progress.
type process struct {
	*Runner
	life   plan.Life
	client sandboxv1.SandboxServiceClient
	uid    string
	// deletes counts the delete calls: each has a request_id of its own, for a call with an earlier one's is answered, not executed.
	deletes int
}

// Run begins each life at its time, independently of the others, and returns when all have ended: deleted, refused, or kept
// until the end. If ctx ends it returns early, with calls that have no answer.
func (r *Runner) Run(ctx context.Context, lives []plan.Life) {
	begin := r.Clock.Now()
	var all sync.WaitGroup
	defer all.Wait()
	for _, l := range lives {
		due := begin.Add(l.At)
		r.wait(ctx, due.Sub(r.Clock.Now()))
		if ctx.Err() != nil {
			return
		}
		all.Go(func() { r.live(ctx, l, due) })
	}
}

func (r *Runner) live(ctx context.Context, l plan.Life, due time.Time) {
	o := &process{Runner: r, life: l, client: r.Clients[l.Index%len(r.Clients)]}
	if !o.create(ctx, due) {
		return
	}
	o.update(ctx, r.Clock.Now())
	if l.DeleteAfter == 0 {
		return
	}
	o.delete(ctx, o.uid)
	if l.Again != nil && ctx.Err() == nil {
		r.live(ctx, *l.Again, r.Clock.Now())
	}
}

func (o *process) call(op audit.Op) audit.Call {
	return audit.Call{Life: o.life.Index, Op: op, Name: o.name(), RequestID: o.requestID()}
}

func (o *process) name() string { return o.Prefix + o.life.Name }

func (o *process) requestID() string { return fmt.Sprintf("%s%d", o.Prefix, o.life.Index) }

// create creates the sandbox and reports whether it exists.
func (o *process) create(ctx context.Context, due time.Time) bool {
	req, spec := o.request()
	calls := make([]audit.Call, 1, 2)
	if o.life.Twice {
		calls = calls[:2]
	}
	var sent sync.WaitGroup
	for i := range calls {
		client := o.Clients[(o.life.Index+i)%len(o.Clients)]
		c := o.call(audit.Create)
		c.Spec, c.Due = spec, due
		sent.Go(func() {
			var stages []*sandboxv1.StageTiming
			// The previous sandbox of the name may still be terminating.
			again := map[string]bool{"SANDBOX_EXISTS": o.life.Follows, "SANDBOX_TERMINATING": o.life.Follows}
			o.repeat(ctx, &c, createLimit, again, func(ctx context.Context) error {
				resp, err := client.CreateSandbox(ctx, req)
				if err == nil {
					stages = resp.GetTimings()
					c.UID, c.Agent = resp.GetSandbox().GetUid(), resp.GetSandbox().GetStatus().GetAssignedPod()
				}
				return err
			})
			c.Phases = append(c.Phases, stagePhases(c, stages)...)
			calls[i] = c
		})
	}
	if o.life.Overtake > 0 {
		o.wait(ctx, o.life.Overtake)
		o.delete(ctx, "")
	}
	sent.Wait()
	unclear := o.life.Overtake > 0
	for _, c := range calls {
		o.Log.add(c)
		switch {
		case c.Outcome == audit.Acked:
			o.uid = c.UID
			o.Log.addLatency(c.Answered.Sub(due))
		case c.Unsure || c.Outcome == audit.Unknown:
			unclear = true
		}
	}
	if o.uid == "" && unclear || o.life.Overtake > 0 {
		o.delete(ctx, "") // by its name: the uid is unknown
		return false
	}
	return o.uid != ""
}

// stagePhases returns the stages of the request that succeeded, which is the last phase so far, and the time of that request
// outside of them: on the network, or where the server waited before the first stage.
func stagePhases(c audit.Call, stages []*sandboxv1.StageTiming) []audit.Phase {
	if len(stages) == 0 || len(c.Phases) == 0 {
		return nil
	}
	var out []audit.Phase
	outside := c.Phases[len(c.Phases)-1].Millis
	for _, s := range stages {
		p := phase("stage: "+s.GetStage(), s.GetDuration().AsDuration(), nil)
		out, outside = append(out, p), outside-p.Millis
	}
	return append(out, audit.Phase{Name: "outside the stages", Millis: max(outside, 0)})
}

func (o *process) request() (*sandboxv1.CreateSandboxRequest, audit.Spec) {
	command := "trap 'exit 0' TERM; sleep 1000000 & wait"
	if o.life.Exit != nil {
		command = fmt.Sprintf("sleep 1; exit %d", *o.life.Exit)
	}
	spec := &sandboxv1.SandboxSpec{
		Image: o.Image, Pool: o.Pool, Command: []string{"sh", "-c", command},
		RecoveryTimeout: durationpb.New(recovery), TerminationGracePeriod: durationpb.New(grace),
	}
	want := audit.Spec{AutoRecreate: o.life.AutoRecreate, Exit: o.life.Exit}
	if o.life.AutoRecreate {
		spec.FailurePolicy = sandboxv1.FailurePolicy_FAILURE_POLICY_AUTO_RECREATE
	}
	if o.life.Strong {
		spec.ConsistencyMode = sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG
	}
	if o.life.TTL > 0 {
		want.ExpireTime = o.Clock.Now().Add(o.life.TTL)
		spec.ExpireTime = timestamppb.New(want.ExpireTime)
	}
	return &sandboxv1.CreateSandboxRequest{Namespace: o.Namespace, Name: o.name(), RequestId: o.requestID(), Spec: spec}, want
}

// update executes the steps and returns when the sandbox is due to be deleted.
func (o *process) update(ctx context.Context, born time.Time) {
	policy := o.life.AutoRecreate
	for i, step := range o.life.Steps {
		o.wait(ctx, born.Add(step.After).Sub(o.Clock.Now()))
		c := o.call(audit.Update)
		in := &sandboxv1.UpdateSandboxRequest{
			Sandbox:    &sandboxv1.Sandbox{Namespace: o.Namespace, Name: o.name(), Uid: o.uid, Spec: &sandboxv1.SandboxSpec{}},
			UpdateMask: &fieldmaskpb.FieldMask{}, RequestId: fmt.Sprintf("%s-%d", o.requestID(), i),
		}
		o.fill(step, in, &c.Change, policy)
		o.repeat(ctx, &c, otherLimit, nil, func(ctx context.Context) error {
			_, err := o.client.UpdateSandbox(ctx, in)
			return err
		})
		if c.Change.AutoRecreate != nil && c.Outcome == audit.Acked {
			policy = *c.Change.AutoRecreate
		}
		o.Log.add(c)
	}
	if o.life.DeleteAfter > 0 {
		o.wait(ctx, born.Add(o.life.DeleteAfter).Sub(o.Clock.Now()))
	}
}

func (o *process) fill(step plan.Step, in *sandboxv1.UpdateSandboxRequest, change *audit.Change, policy bool) {
	var path string
	now := o.Clock.Now()
	switch step.What {
	case plan.SetLabel:
		value := now.UTC().Format("150405.000000")
		path, change.Label = "labels", &value
		in.Sandbox.Labels = map[string]string{Label: value}
	case plan.MoveExpiry:
		later := now.Add(time.Hour)
		path, change.ExpireTime = "spec.expire_time", &later
		in.Sandbox.Spec.ExpireTime = timestamppb.New(later)
	case plan.RemoveExpiry:
		path, change.ExpireTime = "spec.expire_time", &time.Time{}
	case plan.FlipPolicy:
		policy = !policy
		path, change.AutoRecreate = "spec.failure_policy", &policy
		in.Sandbox.Spec.FailurePolicy = sandboxv1.FailurePolicy_FAILURE_POLICY_MANUAL
		if policy {
			in.Sandbox.Spec.FailurePolicy = sandboxv1.FailurePolicy_FAILURE_POLICY_AUTO_RECREATE
		}
	default: // plan.Reset
		path, change.Reset = "spec.reset_revision", &now
		in.Sandbox.Spec.ResetRevision = timestamppb.New(now)
	}
	in.UpdateMask.Paths = []string{path}
}

// delete deletes the sandbox by its name, and by its uid if that is known, until there is an answer.
func (o *process) delete(ctx context.Context, uid string) {
	o.deletes++
	c := o.call(audit.Delete)
	requestID := fmt.Sprintf("%s-delete-%d", o.requestID(), o.deletes)
	o.repeat(ctx, &c, otherLimit, nil, func(ctx context.Context) error {
		_, err := o.client.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{
			Namespace: o.Namespace, Name: o.name(), Uid: uid, RequestId: requestID,
		})
		return err
	})
	// A repeated delete that finds nothing has succeeded: an earlier request deleted the sandbox, or the create never did anything.
	if c.Outcome == audit.Refused && c.Reason == "SANDBOX_NOT_FOUND" && (c.Requests > 1 || uid == "" && o.life.Overtake == 0) {
		c.Outcome = audit.Acked
	}
	o.Log.add(c)
}

// DeleteAll deletes every sandbox that exists according to the log, concurrently, and returns when each delete has an answer.
func (r *Runner) DeleteAll(ctx context.Context, lives []plan.Life) {
	uids, deleted := map[int]string{}, map[int]bool{}
	for _, c := range r.Log.Calls() {
		if c.Op == audit.Create && c.Outcome == audit.Acked {
			uids[c.Life] = c.UID
		}
		deleted[c.Life] = deleted[c.Life] || c.Op == audit.Delete
	}
	limit := make(chan struct{}, 8)
	var all sync.WaitGroup
	for _, l := range lives {
		if uids[l.Index] == "" || deleted[l.Index] {
			continue
		}
		limit <- struct{}{}
		all.Go(func() {
			defer func() { <-limit }()
			o := &process{Runner: r, life: l, client: r.Clients[l.Index%len(r.Clients)]}
			o.delete(ctx, uids[l.Index])
		})
	}
	all.Wait()
}
