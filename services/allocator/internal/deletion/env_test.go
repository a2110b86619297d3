package deletion_test

import (
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/persistence"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
)

var (
	fence = &agentv1.Fence{SandboxUid: "u", Attempt: 1, AgentUid: "a"} //nolint:gochecknoglobals // a constant
	name  = store.Key{Namespace: "ns", Name: "one"}                    //nolint:gochecknoglobals // a constant
	kind  = v1alpha1.GroupVersion.WithResource("sandboxes").GroupResource()

	errLost    = context.DeadlineExceeded
	errRefused = &net.OpError{Op: "dial", Err: errors.New("connection refused")}
)

// agent is the only agent: what it answers, what it reports, and what it was asked.
type agent struct {
	agentv1.AgentServiceClient // what is not used is nil

	mu         sync.Mutex
	script     []answer // of deletes; the last one is repeated
	requests   []*agentv1.DeleteSandboxRequest
	open       []*stream // of deletes that were accepted and not finished
	unanswered []*stream
	away, gone bool
	reported   bool                         // it reports the container
	left       map[identity.Fence]store.Key // other containers that it reports, not written, by their names
	tombstones map[identity.Fence]*agentv1.Tombstone
	holds      bool  // it continues to report a tombstone that it has dropped
	forgetErr  error // of ForgetTombstone
	forgets    int
	released   int // calls of Release
}

// answer is what an agent does with a delete.
type answer func(a *agent, s *stream)

func removes(a *agent, s *stream) {
	accepts(a, s)
	a.finish()
}

// accepts carries a deletion out, and does not finish it.
func accepts(a *agent, s *stream) {
	if t := s.request.GetTombstone(); t != nil {
		a.tombstones[identity.FenceOf(t.GetFence())] = t
	}
	s.messages <- agentv1.DeleteStage_DELETE_STAGE_SIGTERM_SENT
	a.open = append(a.open, s)
}

func silent(a *agent, s *stream) { a.unanswered = append(a.unanswered, s) }

func breaks(_ *agent, s *stream) { s.messages <- errors.New("connection reset") }

func ends(_ *agent, s *stream) { close(s.messages) }

func fails(err error) answer {
	return func(_ *agent, s *stream) { s.messages <- rpc.ToStatus(err) }
}

// disconnect breaks all streams. mu is held.
func (a *agent) disconnect() {
	for _, s := range append(a.open, a.unanswered...) {
		s.messages <- errors.New("connection reset")
	}
	a.open, a.unanswered = nil, nil
}

// finish removes the containers of all deletions that were accepted. mu is held.
func (a *agent) finish() {
	for _, s := range a.open {
		s.messages <- agentv1.DeleteStage_DELETE_STAGE_REMOVED
	}
	a.open, a.reported = nil, false
}

func (a *agent) set(change func(a *agent)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change(a)
}

func (a *agent) calls() []*agentv1.DeleteSandboxRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.requests)
}

func (a *agent) Client(string) (agentv1.AgentServiceClient, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a, !a.away
}

func (a *agent) Gone(string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.gone
}

func (a *agent) Release(*agentv1.Fence) { a.set(func(a *agent) { a.released++ }) }

func (a *agent) Reported(identity.Fence) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.reported
}

func (a *agent) Superseded(f identity.Fence, namespace, name string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.left[f] == store.Key{Namespace: namespace, Name: name}
}

func (a *agent) HasTombstone(f identity.Fence) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.tombstones[f] != nil
}

func (a *agent) Tombstones() (all []*agentv1.Tombstone) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, t := range a.tombstones {
		all = append(all, t)
	}
	return all
}

func (a *agent) DeleteSandbox(ctx context.Context, req *agentv1.DeleteSandboxRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[agentv1.DeleteSandboxResponse], error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.requests = append(a.requests, req)
	next := a.script[0]
	if len(a.script) > 1 {
		a.script = a.script[1:]
	}
	s := &stream{ctx: ctx, request: req, messages: make(chan any, 8)}
	next(a, s)
	return s, nil
}

func (a *agent) MarkPersisted(context.Context, *agentv1.MarkPersistedRequest, ...grpc.CallOption) (*agentv1.MarkPersistedResponse, error) {
	return &agentv1.MarkPersistedResponse{}, nil
}

func (a *agent) ForgetTombstone(_ context.Context, req *agentv1.ForgetTombstoneRequest, _ ...grpc.CallOption) (*agentv1.ForgetTombstoneResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.forgets++
	if a.forgetErr != nil {
		return nil, rpc.ToStatus(a.forgetErr)
	}
	if !a.holds {
		delete(a.tombstones, identity.FenceOf(req.GetFence()))
	}
	return &agentv1.ForgetTombstoneResponse{}, nil
}

// stream is the answer to one delete: stages, and then an error, or its end.
type stream struct {
	grpc.ClientStream
	ctx      context.Context //nolint:containedctx // a stream's context is reached through the stream
	request  *agentv1.DeleteSandboxRequest
	messages chan any
}

func (s *stream) Recv() (*agentv1.DeleteSandboxResponse, error) {
	select { // what has arrived is read, also after the end of the call
	case m, ok := <-s.messages:
		return response(m, ok)
	default:
	}
	select {
	case m, ok := <-s.messages:
		return response(m, ok)
	case <-s.ctx.Done():
		return nil, status.FromContextError(s.ctx.Err()).Err()
	}
}

func response(m any, ok bool) (*agentv1.DeleteSandboxResponse, error) {
	if !ok {
		return nil, io.EOF
	}
	if err, failed := m.(error); failed {
		return nil, err
	}
	return &agentv1.DeleteSandboxResponse{Stage: m.(agentv1.DeleteStage)}, nil
}

// maxCalls is more than the calls of the longest test, whose failing calls come every two seconds.
const maxCalls = 20_000

// server is an API server with at most one custom resource, which has a finalizer.
type server struct {
	mu      sync.Mutex
	there   *v1alpha1.Sandbox
	down    bool
	fail    map[string]error // by verb
	verbs   []string         // the calls
	total   int
	version int
	before  func(verb string)
}

// call notes a call and returns its error. mu is held when it returns nil.
func (s *server) call(verb string) error {
	s.mu.Lock()
	before := s.before
	s.mu.Unlock()
	if before != nil {
		before(verb)
	}
	s.mu.Lock()
	s.verbs = append(s.verbs, verb)
	if s.total++; s.total > maxCalls {
		panic("the API server is called again and again without a delay")
	}
	err := s.fail[verb]
	if s.down {
		err = errRefused
	}
	if err != nil {
		s.mu.Unlock()
	}
	return err
}

func (s *server) set(change func(s *server)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

// resource returns the custom resource; nil if there is none.
func (s *server) resource() *v1alpha1.Sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.there.DeepCopy()
}

// written gives the custom resource its next version. mu is held.
func (s *server) written() {
	s.version++
	s.there.ResourceVersion = strconv.Itoa(s.version)
}

// called returns the number of calls since the last time, of all verbs.
func (s *server) called() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.verbs)
	s.verbs = nil
	return n
}

func (s *server) Get(_ context.Context, key client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	if err := s.call("get"); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if s.there == nil {
		return apierrors.NewNotFound(kind, key.Name)
	}
	s.there.DeepCopyInto(obj.(*v1alpha1.Sandbox))
	return nil
}

func (s *server) Create(_ context.Context, obj client.Object, _ ...client.CreateOption) error {
	if err := s.call("create"); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if s.there != nil {
		return apierrors.NewAlreadyExists(kind, obj.GetName())
	}
	s.there = obj.DeepCopyObject().(*v1alpha1.Sandbox)
	s.written()
	return nil
}

func (s *server) Update(context.Context, client.Object, ...client.UpdateOption) error {
	return errors.New("a deletion updates nothing")
}

func (s *server) Patch(_ context.Context, obj client.Object, _ client.Patch, _ ...client.PatchOption) error {
	if err := s.call("patch"); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if s.there == nil {
		return apierrors.NewNotFound(kind, obj.GetName())
	}
	if s.there.ResourceVersion != obj.GetResourceVersion() {
		return apierrors.NewConflict(kind, obj.GetName(), errors.New("the resource version is another"))
	}
	s.there.Annotations = maps.Clone(obj.GetAnnotations())
	s.written()
	return nil
}

func (s *server) Delete(_ context.Context, obj client.Object, opts ...client.DeleteOption) error {
	if err := s.call("delete"); err != nil {
		return err
	}
	defer s.mu.Unlock()
	o := (&client.DeleteOptions{}).ApplyOptions(opts)
	switch {
	case s.there == nil:
		return apierrors.NewNotFound(kind, obj.GetName())
	case o.Preconditions == nil || *o.Preconditions.UID != s.there.UID:
		return apierrors.NewConflict(kind, obj.GetName(), errors.New("uid"))
	case s.there.DeletionTimestamp == nil:
		now := metav1.Now()
		s.there.DeletionTimestamp = &now
		s.written()
	}
	return nil
}

// env is a Manager with one agent and an API server, on the clock of a synctest bubble.
type env struct {
	*testing.T
	agent            *agent
	api              *server
	manager          *deletion.Manager
	store            *store.Store
	persist          *persistence.Tracker
	leads, announced atomic.Bool
	traced           bool
	stop             func()
}

// bubble runs a test on a fake clock. The agent answers deletes as its script says.
func bubble(t *testing.T, script []answer, test func(e *env)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		e := &env{T: t, agent: &agent{script: script, reported: true, tombstones: map[identity.Fence]*agentv1.Tombstone{}}, api: &server{fail: map[string]error{}, version: 1}}
		e.start()
		t.Cleanup(func() { e.stop() })
		test(e)
	})
}

// start makes the manager, without what an earlier one knew.
func (e *env) start() {
	set, c := tasks.New(), clock.RealClock{}
	e.leads.Store(true)
	e.announced.Store(true)
	e.store = store.New(c)
	api := apiserver.New(e.api, c)
	e.persist = persistence.New(persistence.Config{
		API: api, Agents: e.agent, Store: e.store, Tasks: set, Clock: c, Limit: 1, Leads: e.leads.Load,
		Confirm:  func(context.Context) (bool, error) { return e.leads.Load(), nil },
		Creating: func() bool { return false }, Rejected: func(*agentv1.Fence) {},
	})
	e.manager = deletion.New(deletion.Config{
		Agents: e.agent, Fleet: e.agent, Store: e.store, API: api, Persist: e.persist, Tasks: set, Clock: c,
		Leads: e.leads.Load, Announced: func(string) bool { return e.announced.Load() }, Traced: e.traced,
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = set.Run(ctx) }()
	e.stop = func() { cancel(); <-ended }
}

// restart is the end of the process, and the next one: it finds what the agent and the API server have.
func (e *env) restart() {
	e.stop()
	e.start()
	e.informed()
	e.store.AgentTombstones(e.agent.Tombstones(), nil)
	e.manager.Resume()
}

// informed shows the store the custom resource, as the informer does.
func (e *env) informed() {
	if sb := e.api.resource(); sb != nil {
		e.store.SetResource(sb)
	}
}

// pass lets time pass, and everything happen that can happen by then.
func (e *env) pass(d time.Duration) {
	e.Helper()
	<-time.After(d)
	synctest.Wait()
}

func resource(uid string) *v1alpha1.Sandbox {
	sb := &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, UID: types.UID("cr-" + uid), ResourceVersion: "1",
			Finalizers: []string{v1alpha1.Finalizer}, Annotations: map[string]string{v1alpha1.AnnotationSandboxUID: uid}},
		Spec: v1alpha1.SandboxSpec{Image: "x", PoolRef: "p"},
	}
	sb.SetAssignment(&v1alpha1.Assignment{AgentUID: fence.GetAgentUid(), SandboxUID: uid, Attempt: fence.GetAttempt()})
	return sb
}

// written adds a sandbox whose custom resource is written.
func (e *env) written() store.Item {
	sb := resource(fence.GetSandboxUid())
	e.api.set(func(s *server) { s.there = sb })
	e.store.SetResource(sb.DeepCopy())
	item, ok := e.store.Get(name)
	require.True(e, ok)
	return item
}

// record is a sandbox that its agent has started and acknowledged.
func record() *store.Record {
	return &store.Record{
		Record: &agentv1.SandboxRecord{Fence: fence, Namespace: name.Namespace, Name: name.Name, RequestId: "create",
			Spec: &sandboxv1.SandboxSpec{Image: "x", Pool: "p"}},
		Report: &agentv1.SandboxReport{State: agentv1.SandboxState_SANDBOX_STATE_RUNNING, ContainerId: "u-1"},
	}
}

// unwritten adds a sandbox whose custom resource is being written, by this process alone if ours.
func (e *env) unwritten(ours bool) store.Item {
	item := e.store.SetRecord(record())
	require.NoError(e, e.persist.Admit())
	e.persist.Persist(record(), ours)
	return item
}

// finalized removes the custom resource, and shows that to the store.
func (e *env) finalized() {
	sb := e.api.resource()
	e.api.set(func(s *server) { s.there = nil })
	if sb != nil {
		e.store.RemoveResource(sb)
	}
}

// deletes makes a delete call and returns its error.
func (e *env) deletes(item store.Item, o deletion.Options) error {
	e.Helper()
	done := make(chan error, 1)
	go func() { done <- e.manager.Delete(context.Background(), item, o) }()
	select {
	case err := <-done:
		synctest.Wait()
		return err
	case <-time.After(30 * time.Second):
		require.FailNow(e, "the delete call does not return")
		return nil
	}
}

func (e *env) owns() bool { return e.manager.Owns(identity.FenceOf(fence)) }

func seconds(n int64) *durationpb.Duration { return &durationpb.Duration{Seconds: n} }
