package fastpath

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// requestKey names a create call.
type requestKey struct{ namespace, id string }

// flight is a create that runs, for others with the same request_id to wait for.
type flight struct {
	digest string
	done   chan struct{}
	// Set before done is closed.
	response *sandboxv1.CreateSandboxResponse
	err      error
}

// digestOf tells requests apart, also across versions of this program: it is taken over the custom resource's JSON.
func digestOf(labels map[string]string, spec *sandboxv1.SandboxSpec) string {
	raw, err := json.Marshal(struct {
		Labels map[string]string    `json:"labels,omitempty"`
		Spec   v1alpha1.SandboxSpec `json:"spec"`
	}{labels, convert.SpecFromProto(spec)})
	if err != nil { // strings, numbers and times of a checked range always marshal
		panic(err)
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:16])
}

// once carries a create out once for each request_id. The same request is answered the same again, whether the first is
// still running, was answered by this process, or by a former one; another request is refused.
func (s *Server) once(ctx context.Context, p *plan) (*sandboxv1.CreateSandboxResponse, error) {
	key := requestKey{p.request.GetNamespace(), p.request.GetRequestId()}
	for {
		s.mu.Lock()
		f, running := s.flights[key]
		if !running {
			f = &flight{digest: p.digest, done: make(chan struct{}), err: errAbandoned}
			s.flights[key] = f
			s.mu.Unlock()
			return s.lead(ctx, key, f, p)
		}
		s.mu.Unlock()
		if f.digest != p.digest {
			return nil, errReused(key.id)
		}
		select {
		case <-ctx.Done():
			return nil, fault.Unsettled(errContext(ctx, "waiting for the same request", nil))
		case <-f.done:
		}
		// The first caller's impatience is not the second's: it begins anew.
		if errors.Is(f.err, context.Canceled) || errors.Is(f.err, context.DeadlineExceeded) || errors.Is(f.err, errAbandoned) {
			continue
		}
		if f.err != nil {
			return nil, f.err
		}
		return replay(f.response), nil
	}
}

var errAbandoned = errors.New("the request was abandoned")

func (s *Server) lead(ctx context.Context, key requestKey, f *flight, p *plan) (*sandboxv1.CreateSandboxResponse, error) {
	defer func() { // also after a panic: others wait
		s.mu.Lock()
		delete(s.flights, key)
		if f.err == nil && f.response != nil {
			s.answers.add(s.config.Clock.Now(), key, answer{digest: f.digest, response: f.response})
		}
		s.mu.Unlock()
		close(f.done)
	}()
	response, unfinished, err := s.answered(key, p)
	switch {
	case unfinished != nil:
		response, err = s.resume(ctx, p, unfinished)
	case response == nil && err == nil:
		response, err = s.execute(ctx, p)
	}
	f.response, f.err = response, err
	return response, err
}

// answered returns the answer of an earlier call, if there was one, or the custom resource of one that was not answered;
// nothing if there was none.
func (s *Server) answered(key requestKey, p *plan) (response *sandboxv1.CreateSandboxResponse, unfinished *v1alpha1.Sandbox, err error) {
	s.mu.Lock()
	a, ok := s.answers.get(s.config.Clock.Now(), key)
	s.mu.Unlock()
	item, live := s.store.ByRequest(key.namespace, key.id)
	switch {
	case !ok && !live && s.store.RequestGone(key.namespace, key.id):
		return nil, nil, fault.New(errdefs.ErrAborted, fault.SandboxTerminating, "the sandbox of this request_id has been deleted")
	case !ok && !live:
		return nil, nil, nil
	case !ok && s.givenUp(item.Resource):
		return nil, nil, errUndoing()
	case !ok && s.unsettled(item):
		return nil, nil, fault.Unsettled(fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable,
			"an earlier try of this request_id may still be undone").RetryIn(time.Second))
	case !ok:
		a = answer{digest: itemDigest(item), response: responseOf(item)}
	}
	sameName := p.request.GetName() == "" || p.request.GetName() == a.response.GetSandbox().GetName()
	if a.digest != p.digest || !sameName {
		return nil, nil, errReused(key.id)
	}
	if s.store.Deleting(a.response.GetSandbox().GetUid()) || a.response.GetSandbox().GetDeleteTime() != nil {
		return nil, nil, fault.New(errdefs.ErrAborted, fault.SandboxTerminating,
			"the sandbox %s of this request_id has been deleted", a.response.GetSandbox().GetName())
	}
	if live && !ok && unfinishedBy(item) {
		return nil, item.Resource, nil
	}
	return replay(a.response), nil, nil
}

// unfinishedBy tells whether the create that a former leader began still has to be seen through before it is answered. A
// strong one has, even if it has started: who began it may be stalled, and undo it when it wakes up, until the mark of who
// took it up tells it not to.
func unfinishedBy(item store.Item) bool {
	if item.Resource == nil {
		return false
	}
	phase := item.Sandbox.GetStatus().GetPhase()
	return phase == sandboxv1.Phase_PHASE_PENDING || phase == sandboxv1.Phase_PHASE_BOUND || !toldOf(item.Resource) || !takenUp(item.Resource)
}

// unsettled tells whether all that is known of a sandbox is a container that may yet be deleted: by this process, for an
// earlier try started it and nobody was told, or by a former leader that its agent would still obey.
func (s *Server) unsettled(item store.Item) bool {
	if item.Resource != nil || item.Fence == nil {
		return false
	}
	key := identity.FenceOf(item.Fence)
	// In this order: between the end of a drive and now it was removed, whatever the item still shows.
	return s.reaper.Driving(key) || s.store.ContainerRemoved(key) || !s.config.Announced(key.AgentUID)
}

// itemDigest is the digest of the request that made a sandbox.
func itemDigest(item store.Item) string {
	if item.Resource == nil {
		return digestOf(item.Sandbox.GetLabels(), item.Sandbox.GetSpec())
	}
	return item.Resource.Annotations[v1alpha1.AnnotationRequestDigest]
}

// responseOf rebuilds an answer from what is known; how long the stages took is not.
func responseOf(item store.Item) *sandboxv1.CreateSandboxResponse {
	mode := item.Sandbox.GetSpec().GetConsistencyMode()
	if item.Resource == nil {
		mode = sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST
	}
	return &sandboxv1.CreateSandboxResponse{
		Sandbox: item.Sandbox, Endpoints: item.Sandbox.GetStatus().GetEndpoints(), ConsistencyMode: mode,
		StartPath: item.Sandbox.GetStatus().GetStartPath(),
	}
}

func replay(r *sandboxv1.CreateSandboxResponse) *sandboxv1.CreateSandboxResponse {
	r = proto.CloneOf(r)
	r.Replayed = true
	return r
}

func errReused(id string) error {
	return fault.New(errdefs.ErrAlreadyExists, fault.RequestIDReused, "request_id %q was used with another request", id).
		With("request_id", id)
}

// Bounds of the memory of answers; past them the sandbox itself, while it exists, still tells its request_id.
const (
	answersTTL   = 10 * time.Minute
	answersLimit = 10000
)

type answer struct {
	digest   string
	response *sandboxv1.CreateSandboxResponse
	at       time.Time
}

// answers remembers answers in the order in which they were given.
type answers struct {
	byKey map[requestKey]answer
	order []requestKey
}

func newAnswers() *answers { return &answers{byKey: map[requestKey]answer{}} }

func (a *answers) add(now time.Time, key requestKey, v answer) {
	for len(a.order) > 0 && (len(a.order) >= answersLimit || now.Sub(a.byKey[a.order[0]].at) > answersTTL) {
		delete(a.byKey, a.order[0])
		a.order = a.order[1:]
	}
	if _, ok := a.byKey[key]; ok {
		return // a repetition: it keeps its place in the order
	}
	v.at = now
	a.byKey[key] = v
	a.order = append(a.order, key)
}

func (a *answers) get(now time.Time, key requestKey) (answer, bool) {
	v, ok := a.byKey[key]
	return v, ok && now.Sub(v.at) <= answersTTL
}
