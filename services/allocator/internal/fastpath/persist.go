package fastpath

import (
	"context"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/reap"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/writer"
)

// resourceOf is the custom resource of a record. Its status is the controller's, who derives it from the assignment.
func resourceOf(record *agentv1.SandboxRecord) *v1alpha1.Sandbox {
	labels := map[string]string{v1alpha1.LabelPool: record.GetSpec().GetPool()}
	for k, v := range record.GetLabels() {
		labels[k] = v
	}
	annotations := map[string]string{
		v1alpha1.AnnotationCreateTime:    record.GetCreateTime().AsTime().Format(time.RFC3339Nano),
		v1alpha1.AnnotationRequestDigest: digestOf(record.GetLabels(), record.GetSpec()),
	}
	if record.GetRequestId() != "" {
		annotations[v1alpha1.AnnotationRequestID] = record.GetRequestId()
	}
	if record.GetTraceparent() != "" {
		annotations[v1alpha1.AnnotationTraceparent] = record.GetTraceparent()
	}
	sb := &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: record.GetNamespace(), Name: record.GetName(), Labels: labels, Annotations: annotations,
			Finalizers: []string{v1alpha1.Finalizer},
		},
		Spec: convert.SpecFromProto(record.GetSpec()),
	}
	sb.Spec.ConsistencyMode = v1alpha1.ConsistencyModeStrong
	return sb
}

// fastResourceOf is the custom resource of a sandbox that runs already.
func fastResourceOf(r *store.Record) *v1alpha1.Sandbox {
	sb := resourceOf(r.Record)
	fence := r.Record.GetFence()
	sb.Spec.ConsistencyMode = v1alpha1.ConsistencyModeFast
	sb.Annotations[v1alpha1.AnnotationSandboxUID] = fence.GetSandboxUid()
	if len(validation.IsValidLabelValue(r.NodeName)) == 0 { // a node's name may be longer than a label's value
		sb.Labels[v1alpha1.LabelNode] = r.NodeName
	}
	sb.SetAssignment(&v1alpha1.Assignment{
		AgentPod: r.AgentPod, AgentUID: fence.GetAgentUid(), NodeName: r.NodeName, AgentAddress: r.AgentAddress,
		SandboxUID: fence.GetSandboxUid(), Attempt: fence.GetAttempt(), Started: startedOf(r.Report),
	})
	return sb
}

// startedOf is what a custom resource says of a start from its first write on.
func startedOf(r *agentv1.SandboxReport) *v1alpha1.Started {
	if r.GetStartTime() == nil {
		return nil
	}
	return &v1alpha1.Started{
		SandboxID: r.GetContainerId(), StartTime: metav1.NewMicroTime(r.GetStartTime().AsTime().Truncate(time.Microsecond)),
		StartPath: convert.StartPathFromProto(r.GetStartPath()), Endpoints: r.GetEndpoints(),
	}
}

// job is a write behind.
type job struct {
	*writer.Job
	// ours tells that no other process ever had this sandbox to write.
	ours   bool
	record *store.Record
}

// persist writes the custom resource of an acknowledged sandbox behind. Room in the writer was taken. ours tells that no
// other process can have written it.
func (s *Server) persist(r *store.Record, ours bool) {
	uid := r.Record.GetFence().GetSandboxUid()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.jobs[uid] = job{ours: ours, record: r, Job: s.writer.Write(fastResourceOf(r), func(ctx context.Context, o writer.Outcome, there *v1alpha1.Sandbox) {
		s.written(ctx, r, o, there)
	})}
}

// job is the write behind of a sandbox; false if there is none.
func (s *Server) job(uid string) (job, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	j, ok := s.jobs[uid]
	return j, ok
}

// written follows up a write behind. One that was stopped is followed up by who stopped it.
func (s *Server) written(ctx context.Context, r *store.Record, o writer.Outcome, there *v1alpha1.Sandbox) {
	fence := r.Record.GetFence()
	key := store.Key{Namespace: r.Record.GetNamespace(), Name: r.Record.GetName()}
	log := logr.FromContextOrDiscard(ctx).WithValues("sandbox", key.String(), "uid", fence.GetSandboxUid())
	j, _ := s.job(fence.GetSandboxUid())
	switch o {
	case writer.Landed:
		s.store.SetResource(there)
		if !j.ours {
			s.tellAdopted(there, r)
		}
	case writer.Conflict:
		s.tellConflict(r, there)
		log.Error(nil, "the name was taken in the API server, or its namespace is gone; removing the container of the fast create",
			"agent", r.AgentPod)
		s.store.MarkGone(key, fence.GetSandboxUid())
		s.reaper.Drive(reap.Order{Fence: fence})
	}
	s.mu.Lock()
	delete(s.jobs, fence.GetSandboxUid())
	s.mu.Unlock()
	if o == writer.Landed {
		log.V(2).Info("custom resource written")
		s.markPersisted(ctx, fence)
	}
}

// markPersisted tells the agent that the custom resource is written, until it knows or the sandbox is no more.
func (s *Server) markPersisted(ctx context.Context, fence *agentv1.Fence) {
	uid := fence.GetSandboxUid()
	s.mu.Lock()
	_, already := s.marking[uid]
	s.marking[uid] = struct{}{}
	s.mu.Unlock()
	if already {
		return
	}
	defer func() {
		s.mu.Lock()
		delete(s.marking, uid)
		s.mu.Unlock()
	}()
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 50*time.Millisecond, 5*time.Second
	for s.config.Lead.Leads() && !s.store.Deleting(uid) && !s.config.Agents.Gone(fence.GetAgentUid()) {
		err := s.markOnce(ctx, fence)
		if err == nil || errdefs.IsNotFound(err) || fault.ReasonOf(err) == fault.FenceMismatch {
			return
		}
		logr.FromContextOrDiscard(ctx).V(2).Info("telling agent again that the sandbox is written", "uid", uid, "err", err.Error())
		timer := s.config.Clock.NewTimer(wait.NextBackOff())
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C():
		}
	}
}

func (s *Server) markOnce(ctx context.Context, fence *agentv1.Fence) error {
	client, ok := s.config.Agents.Client(fence.GetAgentUid())
	if !ok {
		return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "there is no connection to the agent")
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_, err := client.MarkPersisted(ctx, &agentv1.MarkPersistedRequest{Fence: fence})
	return rpc.FromStatus(err)
}
