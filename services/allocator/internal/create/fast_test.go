package create_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeapi"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/create"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/pools"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// TestFastCreate follows a create through its steps: it is acknowledged before its custom resource is written.
func TestFastCreate(t *testing.T) {
	e := newEnv(t, 5)
	response, err := e.create(t.Context(), request(func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Ports = []int32{80} }))
	require.NoError(t, err)
	require.Equal(t, []string{"reserve", "agent", "admitted", "task", "started"}, stages(response))
	require.Equal(t, []string{"10.0.0.1:80"}, response.GetEndpoints())
	require.Equal(t, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST, response.GetConsistencyMode())
	require.Equal(t, sandboxv1.Phase_PHASE_RUNNING, response.GetSandbox().GetStatus().GetPhase())
	item, ok := e.store.Get(one)
	require.True(t, ok, "it is visible at once")
	require.Nil(t, item.Resource)
	require.Empty(t, e.resources(), "the write waits for the clock")
	require.EqualValues(t, 1, e.persist.Pending())
	require.False(t, e.inFlight.Any())
	uid := response.GetSandbox().GetUid()
	require.True(t, e.persist.Owns(uid))

	e.until("it is written and marked", func() bool { return e.resource("one") != nil && !e.persist.Owns(uid) })
	require.Equal(t, uid, e.resource("one").EffectiveUID())
	require.True(t, e.agents["a"].Sandboxes()[0].GetPersisted())
	require.Zero(t, e.persist.Pending())
	require.Zero(t, e.deletes())
}

// TestServerChoosesName: two creates without a name are two sandboxes.
func TestServerChoosesName(t *testing.T) {
	e := newEnv(t, 5)
	seen := map[string]bool{}
	for range 2 {
		response, err := e.create(t.Context(), request(func(r *sandboxv1.CreateSandboxRequest) { r.Name = "" }))
		require.NoError(t, err)
		require.Regexp(t, "^sbx-[0-9a-f]{12}$", response.GetSandbox().GetName())
		seen[response.GetSandbox().GetName()] = true
	}
	require.Len(t, seen, 2)
}

// TestRefusedBeforeAnyAgent is about every step before an agent is asked.
func TestRefusedBeforeAnyAgent(t *testing.T) {
	elsewhere := func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Pool = "elsewhere" }
	tests := map[string]struct {
		change  func(*sandboxv1.CreateSandboxRequest)
		arrange func(*env)
		reason  fault.Reason
		class   func(error) bool
	}{
		"it has expired": {change: func(r *sandboxv1.CreateSandboxRequest) {
			r.Spec.ExpireTime = timestamppb.New(time.Unix(1_700_000_000, 0))
		}, reason: fault.InvalidField, class: errdefs.IsInvalidArgument},
		"it asks for more than the pool allows": {
			change:  func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Resources = &sandboxv1.ResourceLimits{Pids: 1 << 22} },
			arrange: limitPids, reason: fault.InvalidField, class: errdefs.IsInvalidArgument,
		},
		"no such pool": {change: elsewhere, reason: fault.PoolNotFound, class: errdefs.IsNotFound},
		"no such pool in memory, and the API server is away": {
			change: elsewhere, arrange: func(e *env) { e.api.Before(fails(fakeapi.Refused())) }, reason: fault.APIUnavailable, class: errdefs.IsUnavailable,
		},
		"a pool that the informer has not shown has no agents": {
			change: elsewhere, arrange: func(e *env) {
				require.NoError(e.t, e.api.Create(context.Background(), &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "elsewhere"}}))
			}, reason: fault.NoCapacity, class: errdefs.IsResourceExhausted,
		},
		"the name is taken in memory": {arrange: func(e *env) {
			e.store.SetResource(theirs())
		}, reason: fault.SandboxExists, class: errdefs.IsAlreadyExists},
		"no agent is ready": {arrange: func(e *env) { e.clock.Step(time.Minute) }, reason: fault.NoCapacity, class: errdefs.IsResourceExhausted},
		"no agent is connected": {arrange: func(e *env) {
			e.clients.set("a", nil)
		}, reason: fault.AgentUnavailable, class: errdefs.IsUnavailable},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, 5)
			if test.arrange != nil {
				test.arrange(e)
			}
			_, err := e.create(t.Context(), request(test.change))
			require.Equal(t, test.reason, fault.ReasonOf(err), "%v", err)
			require.True(t, test.class(err))
			require.False(t, fault.IsUnsettled(err))
			require.Zero(t, e.creates())
			e.store.RemoveResource(theirs())
			e.requireNothingNow()
		})
	}
}

// limitPids gives the pool a maximum.
func limitPids(e *env) {
	e.pools.Set(&v1alpha1.SandboxPool{ObjectMeta: poolMeta(), Spec: v1alpha1.SandboxPoolSpec{
		MaxSandboxResources: &v1alpha1.SandboxResources{Limits: corev1.ResourceList{"pids": resource.MustParse("100")}},
	}})
}

// TestMaximumOfThePool: the error names the field, a repetition of a create from before the maximum is answered, and the default
// is within the maximum.
func TestMaximumOfThePool(t *testing.T) {
	e := newEnv(t, 5)
	large := request(func(r *sandboxv1.CreateSandboxRequest) {
		r.RequestId, r.Spec.Resources = "large", &sandboxv1.ResourceLimits{Pids: 101}
	})
	_, err := e.create(t.Context(), large)
	require.NoError(t, err)
	limitPids(e)
	again, err := e.create(t.Context(), large)
	require.NoError(t, err)
	require.True(t, again.GetReplayed())
	_, err = e.create(t.Context(), request(func(r *sandboxv1.CreateSandboxRequest) {
		r.Name, r.Spec.Resources = "two", &sandboxv1.ResourceLimits{Pids: 101}
	}))
	require.EqualError(t, err, "spec.resources.pids: 101 exceeds the pool's maximum of 100")
	_, err = e.create(t.Context(), request(func(r *sandboxv1.CreateSandboxRequest) { r.Name = "three" }))
	require.NoError(t, err)
	for _, sb := range e.agents["a"].Sandboxes() {
		if sb.GetRecord().GetName() == "three" {
			require.EqualValues(t, 100, sb.GetRecord().GetLimits().GetPids())
			require.EqualValues(t, 512<<20, sb.GetRecord().GetLimits().GetMemoryBytes())
			return
		}
	}
	t.Fatal("the agent does not have it")
}

// theirs returns the custom resource of another client that has the name.
func theirs() *v1alpha1.Sandbox {
	return &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "one", UID: "theirs"}, Spec: v1alpha1.SandboxSpec{Image: "theirs", PoolRef: pool},
	}
}

func TestUnsyncedPoolIsUnavailable(t *testing.T) {
	e := newEnv(t, 5)
	e.pools = pools.New()
	e.restart()
	_, err := e.create(t.Context(), request(nil))
	require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err), "it may exist")
	e.requireNothingNow()
}

func TestPendingWritesAreBounded(t *testing.T) {
	e := newEnv(t, 5)
	for range writeLimit {
		require.NoError(t, e.persist.Admit())
	}
	_, err := e.create(t.Context(), request(nil))
	require.Equal(t, fault.Overloaded, fault.ReasonOf(err))
	require.Zero(t, e.creates())
	require.EqualValues(t, writeLimit, e.persist.Pending(), "the room of others stays")
	for range writeLimit {
		e.persist.Abandon()
	}
	e.requireNothingNow()
}

// TestNameOfDeletedSandbox: a create waits a moment for the end of a deletion under its name.
func TestNameOfDeletedSandbox(t *testing.T) {
	gone := theirs()
	gone.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	tests := map[string]struct {
		then   func(*env)
		reason fault.Reason
	}{
		"it ends":          {func(e *env) { e.store.RemoveResource(gone) }, ""},
		"it does not end":  {func(e *env) { e.clock.Step(2 * time.Second) }, fault.SandboxExists},
		"another takes it": {func(e *env) { later := theirs(); later.UID = "later"; e.store.SetResource(later) }, fault.SandboxExists},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, 5)
			e.store.SetResource(gone)
			done := e.begin(t.Context(), request(nil))
			e.await("it waits", e.clock.HasWaiters)
			require.Empty(t, done)
			test.then(e)
			r := <-done
			require.Equal(t, test.reason, fault.ReasonOf(r.err))
			require.Equal(t, test.reason == "", e.creates() == 1)
		})
	}
}

// TestAgentFailure is about what an agent answers: which answers another agent may better, and what each leaves behind.
func TestAgentFailure(t *testing.T) {
	answer := func(err error) func(*env) { return func(e *env) { e.script(onFirst(err)) } }
	superseded := fault.New(errdefs.ErrFailedPrecondition, fault.LeaderSuperseded, "term 7 is known")
	tests := map[string]struct {
		arrange func(*env)
		// next is set if the create continues with the other agent; reason is that of its error otherwise.
		next   bool
		reason fault.Reason
		// deleted is set if the container of the first attempt is deleted.
		deleted bool
	}{
		"no capacity":                            {answer(fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full")), true, "", false},
		"port conflict":                          {answer(fault.New(errdefs.ErrResourceExhausted, fault.PortConflict, "80")), true, "", false},
		"runtime unavailable":                    {answer(fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "no")), true, "", false},
		"pull failed":                            {answer(fault.New(errdefs.ErrUnavailable, fault.ImagePullFailed, "no")), true, "", false},
		"draining":                               {answer(fault.New(errdefs.ErrUnavailable, fault.AgentDraining, "no")), true, "", false},
		"internal":                               {answer(fault.New(errdefs.ErrInternal, fault.Internal, "bug")), true, "", true},
		"the connection breaks before the start": {answer(status.Error(codes.Unavailable, "reset")), true, "", true},
		"the connection breaks after the start": {func(e *env) {
			for _, a := range e.agents {
				a.OnStarted = onFirst(status.Error(codes.Unavailable, "reset"))
			}
		}, true, "", true},
		"the stream ends without a start": {func(e *env) {
			e.replaceClients(func(c agentv1.AgentServiceClient) agentv1.AgentServiceClient {
				return &mute{AgentServiceClient: c, err: io.EOF}
			})
		}, true, "", true},
		"no such image":          {answer(fault.New(errdefs.ErrNotFound, fault.ImageNotFound, "no")), false, fault.ImageNotFound, false},
		"no such command":        {answer(fault.New(errdefs.ErrFailedPrecondition, fault.CommandNotFound, "no")), false, fault.CommandNotFound, false},
		"invalid":                {answer(fault.Field("spec.ports", "no")), false, fault.InvalidField, false},
		"a later leader rules":   {answer(superseded), false, fault.NotLeader, true},
		"a later leader cut in":  {answer(fault.New(context.Canceled, fault.LeaderSuperseded, "lost")), false, fault.NotLeader, true},
		"later leader, no class": {answer(fault.New(errdefs.ErrAborted, fault.LeaderSuperseded, "lost")), false, fault.NotLeader, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, 5, 5)
			test.arrange(e)
			response, err := e.create(t.Context(), request(nil))
			deletes := 0
			if test.deleted {
				deletes = 1
			}
			if !test.next {
				require.Equal(t, test.reason, fault.ReasonOf(err), "%v", err)
				require.Equal(t, 1, e.creates(), "no other agent is asked")
				e.until("its container is deleted", func() bool { return e.deletes() == deletes })
				e.requireNothing()
				return
			}
			require.NoError(t, err)
			require.EqualValues(t, 2, response.GetSandbox().GetStatus().GetAttempt(), "no container id is used twice")
			e.until("the first attempt leaves nothing", func() bool {
				return e.deletes() == deletes && len(e.agents["a"].Sandboxes())+len(e.agents["b"].Sandboxes()) == 1 && e.allocated() == 1
			})
			last := e.agents[response.GetSandbox().GetStatus().GetAssignedPod()[len("pod-"):]]
			require.Len(t, last.Sandboxes(), 1, "the second attempt stays")
			require.False(t, e.creator.Unsettled(one))
		})
	}
}

// mute is an agent that never answers the first attempt of a create: its stream ends with err, or with the caller's context
// if err is nil.
type mute struct {
	agentv1.AgentServiceClient
	err error
}

func (m *mute) CreateSandbox(ctx context.Context, req *agentv1.CreateSandboxRequest, opts ...grpc.CallOption) (grpc.ServerStreamingClient[agentv1.CreateSandboxResponse], error) {
	if req.GetRecord().GetFence().GetAttempt() > 1 {
		return m.AgentServiceClient.CreateSandbox(ctx, req, opts...)
	}
	return &muteStream{ctx: ctx, err: m.err}, nil
}

type muteStream struct {
	grpc.ClientStream
	ctx context.Context //nolint:containedctx // a stream's context is reached through the stream
	err error
}

func (s *muteStream) Recv() (*agentv1.CreateSandboxResponse, error) {
	if s.err != nil {
		return nil, s.err
	}
	<-s.ctx.Done()
	return nil, status.FromContextError(s.ctx.Err()).Err()
}

// admitting is an agent whose stream of a create announces that its caller knows of the admission: it waits for the next message.
type admitting struct {
	agentv1.AgentServiceClient
	admitted chan struct{}
}

func (a *admitting) CreateSandbox(ctx context.Context, req *agentv1.CreateSandboxRequest, opts ...grpc.CallOption) (grpc.ServerStreamingClient[agentv1.CreateSandboxResponse], error) {
	stream, err := a.AgentServiceClient.CreateSandbox(ctx, req, opts...)
	return &admittingStream{ServerStreamingClient: stream, admitted: a.admitted}, err
}

type admittingStream struct {
	grpc.ServerStreamingClient[agentv1.CreateSandboxResponse]
	received int
	admitted chan struct{}
}

func (s *admittingStream) Recv() (*agentv1.CreateSandboxResponse, error) {
	if s.received++; s.received == 2 {
		select {
		case s.admitted <- struct{}{}:
		default:
		}
	}
	return s.ServerStreamingClient.Recv()
}

// admissions returns a channel that receives the first admission that a create learns of.
func (e *env) admissions() chan struct{} {
	admitted := make(chan struct{}, 1)
	e.replaceClients(func(c agentv1.AgentServiceClient) agentv1.AgentServiceClient { return &admitting{c, admitted} })
	return admitted
}

func TestInternalErrorsAreBounded(t *testing.T) {
	e := newEnv(t, 5, 5, 5, 5)
	e.script(func(context.Context, *agentv1.SandboxRecord) error {
		return fault.New(errdefs.ErrInternal, fault.Internal, "bug")
	})
	_, err := e.create(t.Context(), request(nil))
	require.Equal(t, fault.Internal, fault.ReasonOf(err))
	require.Equal(t, 3, e.creates(), "the fourth agent is spared")
	e.requireNothing()
}

// TestLastErrorIsReturned: that there is no other agent is not what the caller needs to know.
func TestLastErrorIsReturned(t *testing.T) {
	e := newEnv(t, 5, 5)
	e.script(func(context.Context, *agentv1.SandboxRecord) error {
		return fault.New(errdefs.ErrUnavailable, fault.ImagePullFailed, "registry away")
	})
	_, err := e.create(t.Context(), request(nil))
	require.Equal(t, fault.ImagePullFailed, fault.ReasonOf(err))
	require.Equal(t, 2, e.creates())
	e.requireNothingNow()
}

// TestSilentAgent: one that is stopped or cut off neither fails nor answers.
func TestSilentAgent(t *testing.T) {
	hang := func(e *env) chan struct{} {
		e.script(func(ctx context.Context, r *agentv1.SandboxRecord) error {
			if r.GetFence().GetAttempt() > 1 {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		})
		return e.admissions()
	}
	tests := map[string]struct {
		arrange func(*env) (asked chan struct{})
		reports bool // the agent sends its status
		after   time.Duration
	}{
		"it does not admit the sandbox": {func(e *env) chan struct{} {
			asked := make(chan struct{}, 1)
			e.replaceClients(func(c agentv1.AgentServiceClient) agentv1.AgentServiceClient { return &mute{AgentServiceClient: c} })
			count := e.fleet.reserved
			first := sync.OnceFunc(func() { close(asked) })
			e.fleet.reserved = func() { count(); first() }
			return asked
		}, true, create.DefaultAdmissionTimeout},
		"it is silent after the admission": {hang, false, create.DefaultSilenceTimeout},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, 5, 5)
			var attempts atomic.Int32
			e.fleet.reserved = func() { attempts.Add(1) }
			progressed := test.arrange(e)
			began := e.clock.Now()
			done := e.begin(t.Context(), request(nil))
			<-progressed
			asked, other := "a", "b"
			if v, _ := e.registry.Agent(e.clock.Now(), "b"); v.Allocated > 0 {
				asked, other = "b", "a"
			}
			e.await("the create continues", func() bool {
				if len(done) > 0 {
					return true
				}
				e.heartbeat(other)
				if test.reports {
					e.heartbeat(asked)
				}
				if attempts.Load() == 1 { // the second agent may take as long as a busy machine makes it
					e.clock.Step(100 * time.Millisecond)
				}
				return false
			})
			r := <-done
			require.NoError(t, r.err)
			require.Equal(t, "pod-"+other, r.response.GetSandbox().GetStatus().GetAssignedPod())
			require.GreaterOrEqual(t, e.clock.Since(began), test.after)
			e.until("the first attempt is deleted", func() bool { return len(e.agents[asked].Deletes()) == 1 })
		})
	}
}

// TestSlowAgentIsAwaited: an agent that reports may take as long as an image needs.
func TestSlowAgentIsAwaited(t *testing.T) {
	e := newEnv(t, 5)
	pulled := make(chan struct{})
	e.script(func(ctx context.Context, _ *agentv1.SandboxRecord) error {
		select {
		case <-pulled:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	admitted := e.admissions()
	done := e.begin(t.Context(), request(nil))
	<-admitted
	for range 100 {
		e.heartbeat("a")
		e.clock.Step(create.DefaultSilenceTimeout / 10)
	}
	close(pulled)
	r := <-done
	require.NoError(t, r.err)
	require.Zero(t, e.deletes())
}

// TestUnresponsiveAgentIsUnavailable: without another candidate the error is the agent's, and the create may be repeated.
func TestUnresponsiveAgentIsUnavailable(t *testing.T) {
	e := newEnv(t, 5)
	e.replaceClients(func(c agentv1.AgentServiceClient) agentv1.AgentServiceClient { return &mute{AgentServiceClient: c} })
	done := e.begin(t.Context(), request(nil))
	e.await("it is asked", e.clock.HasWaiters)
	r := e.end(done)
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(r.err))
	require.ErrorContains(t, r.err, "does not answer")
	_, retry := fault.RetryAfter(r.err)
	require.True(t, retry)
	e.requireNothing()
}

// TestUnsettledAttempt: the error says so while a container may be left, and names the sandbox, whose name the server may have
// TestClosedConnectionIsUnavailable: the connection to an agent whose Pod is gone is closed by this process, which gRPC calls
// canceled. The caller has canceled nothing.
func TestClosedConnectionIsUnavailable(t *testing.T) {
	e := newEnv(t, 5)
	e.replaceClients(func(c agentv1.AgentServiceClient) agentv1.AgentServiceClient {
		return &mute{AgentServiceClient: c, err: status.Error(codes.Canceled, "grpc: the client connection is closing")}
	})
	_, err := e.create(t.Context(), request(nil))
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(err), "%v", err)
	require.ErrorContains(t, err, "the connection to the agent was closed")
}

// chosen.
func TestUnsettledAttempt(t *testing.T) {
	tests := map[string]struct {
		err       error
		reason    fault.Reason
		unsettled bool
	}{
		"the connection broke":   {status.Error(codes.Unavailable, "reset"), fault.AgentUnavailable, true},
		"a later leader cut in":  {fault.New(context.Canceled, fault.LeaderSuperseded, "lost"), fault.NotLeader, true},
		"a later leader rules":   {fault.New(errdefs.ErrFailedPrecondition, fault.LeaderSuperseded, "term 7 is known"), fault.NotLeader, false},
		"the agent's own answer": {fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full"), fault.NoCapacity, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, 5)
			var reachable atomic.Bool
			e.script(onFirst(test.err))
			e.agents["a"].OnDelete = func(context.Context, *agentv1.Fence) error {
				if reachable.Load() {
					return nil
				}
				return errors.New("cut off")
			}
			_, err := e.create(t.Context(), request(func(r *sandboxv1.CreateSandboxRequest) { r.Name = "" }))
			require.Equal(t, test.reason, fault.ReasonOf(err))
			require.Equal(t, test.unsettled, fault.IsUnsettled(err))
			if test.unsettled {
				name := store.Key{Namespace: ns, Name: strings.TrimPrefix(sandboxOf(err), ns+"/")}
				require.NotEmpty(t, name.Name)
				require.True(t, e.creator.Unsettled(name))
				require.Equal(t, 1, e.allocated(), "the capacity stays reserved until then")
				reachable.Store(true)
				e.until("it is settled", func() bool { return !e.creator.Unsettled(name) })
			}
			reachable.Store(true)
			e.requireNothing()
		})
	}
}

func TestOneNameIsCreatedOnce(t *testing.T) {
	e := newEnv(t, 5)
	var created, taken atomic.Int64
	var running sync.WaitGroup
	for range writeLimit {
		running.Go(func() {
			switch _, err := e.create(t.Context(), request(nil)); {
			case err == nil:
				created.Add(1)
			case fault.ReasonOf(err) == fault.SandboxExists:
				taken.Add(1)
			}
		})
	}
	running.Wait()
	require.EqualValues(t, 1, created.Load())
	require.EqualValues(t, writeLimit-1, taken.Load())
	require.Equal(t, 1, e.creates())
}

// TestNameIsFreeAfterFailure: the second of two creates waits for the first, and has the name once that has failed.
func TestNameIsFreeAfterFailure(t *testing.T) {
	e := newEnv(t, 5)
	fail := make(chan error)
	e.script(func(ctx context.Context, r *agentv1.SandboxRecord) error {
		if r.GetLabels()["first"] == "" {
			return nil
		}
		select {
		case err := <-fail:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	first := e.begin(t.Context(), request(func(r *sandboxv1.CreateSandboxRequest) { r.Labels = map[string]string{"first": "x"} }))
	e.await("the first is under way", func() bool { return e.creates() == 1 })
	second := e.begin(t.Context(), request(nil))
	e.await("the second waits for the name", func() bool { return e.clock.Waiters() == 2 }) // one for the first's admission
	require.Equal(t, 1, e.creates())
	fail <- fault.New(errdefs.ErrNotFound, fault.ImageNotFound, "no")
	require.Equal(t, fault.ImageNotFound, fault.ReasonOf((<-first).err))
	r := <-second
	require.NoError(t, r.err)
	require.Equal(t, 2, e.creates())
}
