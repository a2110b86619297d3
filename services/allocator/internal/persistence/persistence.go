// Package persistence gets acknowledged sandboxes into the API server: it writes their custom resources behind the
// acknowledgement, and has their agents mark them as persisted. It owns which sandboxes are being written or marked, and
// the shape of the custom resources. It never decides that a sandbox is to be written, or deleted. All methods may be
// called concurrently.
//
//	acknowledged --Persist--> writing --Landed----> marking --> persisted
//	                             |  |---Conflict--> the container is deleted: the name is another sandbox's
//	                             |  \---Rejected--> the sandbox fails and is deleted: admission refuses the custom resource
//	                             \--Stop----------> the caller's, with the outcome so far
package persistence

import (
	"context"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/writer"
)

// Agents finds agents.
type Agents interface {
	// Client returns the connection to an agent; false if there is none now.
	Client(uid string) (agentv1.AgentServiceClient, bool)
	// Gone reports whether the agent's Pod is certainly gone.
	Gone(uid string) bool
}

// Config is what a Tracker needs.
type Config struct {
	API    *apiserver.Client
	Agents Agents
	Store  *store.Store
	Tasks  *tasks.Set
	Clock  clock.Clock
	// Limit is how many custom resources may wait to be written or deleted.
	Limit int
	// Leads reports whether this process leads, as far as it knows; Confirm, whether it certainly does.
	Leads   func() bool
	Confirm func(ctx context.Context) (bool, error)
	// Creating reports whether fast creates run.
	Creating func() bool
	// Rejected deletes the container of a sandbox whose custom resource can never be written.
	Rejected func(fence *agentv1.Fence)
	// Events takes Kubernetes Events; nil for none.
	Events Events
}

// Tracker writes and marks sandboxes.
type Tracker struct {
	*writer.Writer // its room for pending writes

	config Config

	mu      sync.Mutex
	writes  map[string]Job      // by sandbox uid
	marking map[string]struct{} // sandbox uids whose agent is being asked to mark them
}

// Job is the write of one custom resource.
type Job struct {
	*writer.Job
	// Ours reports that no other process ever had this sandbox to write.
	Ours bool
	// Record is what is written.
	Record *store.Record
}

// New returns a tracker with nothing to do.
func New(cfg Config) *Tracker {
	t := &Tracker{config: cfg, writes: map[string]Job{}, marking: map[string]struct{}{}}
	t.Writer = writer.New(writer.Config{
		Resources: cfg.API, Tasks: cfg.Tasks, Clock: cfg.Clock, Limit: cfg.Limit, Confirm: cfg.Confirm, Busy: cfg.Creating,
		Dead: func(sb *v1alpha1.Sandbox) bool { return cfg.Store.Deleting(store.KeyOf(sb), sb.EffectiveUID()) },
	})
	return t
}

// Persist writes the custom resource of an acknowledged sandbox in the background. The caller has taken room for it by
// Admit or AdmitAlways. ours says that no other process can have written it.
func (t *Tracker) Persist(r *store.Record, ours bool) {
	uid := r.Record.GetFence().GetSandboxUid()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.writes[uid] = Job{Ours: ours, Record: r, Job: t.Write(FastResource(r), func(ctx context.Context, o writer.Outcome, there *v1alpha1.Sandbox) {
		t.written(ctx, r, o, there)
	})}
}

// Writing returns the write of a sandbox; false if none runs.
func (t *Tracker) Writing(uid string) (Job, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	w, ok := t.writes[uid]
	return w, ok
}

// Owns reports whether a sandbox is being written or marked.
func (t *Tracker) Owns(uid string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, writing := t.writes[uid]
	_, marking := t.marking[uid]
	return writing || marking
}

// written follows up a write. One that was stopped is followed up by the caller that stopped it.
func (t *Tracker) written(ctx context.Context, r *store.Record, o writer.Outcome, there *v1alpha1.Sandbox) {
	fence := r.Record.GetFence()
	key := store.Key{Namespace: r.Record.GetNamespace(), Name: r.Record.GetName()}
	log := logr.FromContextOrDiscard(ctx).WithValues(obs.KeySandbox, key.String(), obs.KeySandboxUID, fence.GetSandboxUid())
	w, _ := t.Writing(fence.GetSandboxUid())
	switch o {
	case writer.Landed:
		t.config.Store.SetResource(there)
		if !w.Ours {
			t.recordAdoption(there, r)
		}
	case writer.Rejected:
		cause := w.Cause().Error()
		t.recordRejection(r, cause)
		log.Info("deleting container of a fast create: admission refuses its custom resource", obs.KeyAgent, r.AgentPod, obs.KeyCause, cause)
		t.config.Store.MarkFailed(key, fence.GetSandboxUid(), reasonRejected, cause) // watches show why it ends
		t.config.Store.MarkGone(key, fence.GetSandboxUid())
		t.config.Rejected(fence)
	case writer.Conflict:
		t.recordConflict(r, there)
		log.Error(nil, "deleting container of a fast create: its name is taken in the API server, or its namespace is gone", obs.KeyAgent, r.AgentPod)
		t.config.Store.MarkGone(key, fence.GetSandboxUid())
		t.config.Rejected(fence)
	}
	t.mu.Lock()
	delete(t.writes, fence.GetSandboxUid())
	t.mu.Unlock()
	if o == writer.Landed {
		log.V(2).Info("custom resource written")
		t.mark(ctx, key, fence)
	}
}

// Mark has the agent mark a sandbox as persisted, in the background, until it has or the sandbox is gone.
func (t *Tracker) Mark(key store.Key, fence *agentv1.Fence) {
	t.config.Tasks.Go(func(ctx context.Context) { t.mark(ctx, key, fence) })
}

// markTimeout bounds one call to an agent.
const markTimeout = 5 * time.Second

func (t *Tracker) mark(ctx context.Context, key store.Key, fence *agentv1.Fence) {
	uid := fence.GetSandboxUid()
	t.mu.Lock()
	_, already := t.marking[uid]
	t.marking[uid] = struct{}{}
	t.mu.Unlock()
	if already {
		return
	}
	defer func() {
		t.mu.Lock()
		delete(t.marking, uid)
		t.mu.Unlock()
	}()
	delays := backoff.New(t.config.Clock, backoff.Policy{Initial: 50 * time.Millisecond, Max: 5 * time.Second})
	for t.config.Leads() && !t.config.Store.Deleting(key, uid) && !t.config.Agents.Gone(fence.GetAgentUid()) {
		err := t.markOnce(ctx, fence)
		if err == nil || errdefs.IsNotFound(err) || fault.ReasonOf(err) == fault.FenceMismatch {
			return
		}
		logr.FromContextOrDiscard(ctx).V(2).Info("marking sandbox as persisted again", obs.KeySandboxUID, uid, obs.KeyError, err.Error())
		if delays.Wait(ctx) != nil {
			return
		}
	}
}

func (t *Tracker) markOnce(ctx context.Context, fence *agentv1.Fence) error {
	client, ok := t.config.Agents.Client(fence.GetAgentUid())
	if !ok {
		return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "there is no connection to the agent")
	}
	ctx, cancel := context.WithTimeout(ctx, markTimeout)
	defer cancel()
	_, err := client.MarkPersisted(ctx, &agentv1.MarkPersistedRequest{Fence: fence})
	return rpc.FromStatus(err)
}
