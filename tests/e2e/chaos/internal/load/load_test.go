package load_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"k8s.io/utils/clock"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/load"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/plan"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// server answers creates and deletes by its scripts, and repeats the last answer.
type server struct {
	sandboxv1.SandboxServiceClient

	mu        sync.Mutex
	creates   []error
	deletes   []error
	createIDs map[string]int
	deleteIDs map[string]bool
	deleted   []string
	updates   []*sandboxv1.UpdateSandboxRequest
}

func next(script *[]error) error {
	if len(*script) == 0 {
		return nil
	}
	err := (*script)[0]
	if len(*script) > 1 {
		*script = (*script)[1:]
	}
	return err
}

func (s *server) CreateSandbox(_ context.Context, in *sandboxv1.CreateSandboxRequest, _ ...grpc.CallOption) (*sandboxv1.CreateSandboxResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.createIDs == nil {
		s.createIDs = map[string]int{}
	}
	s.createIDs[in.GetRequestId()]++
	if err := next(&s.creates); err != nil {
		return nil, err
	}
	return &sandboxv1.CreateSandboxResponse{
		Sandbox: &sandboxv1.Sandbox{Uid: "uid-" + in.GetName(), Status: &sandboxv1.SandboxStatus{AssignedPod: "agent"}},
		Timings: []*sandboxv1.StageTiming{{Stage: "reserve", Duration: durationpb.New(3 * time.Millisecond)}},
	}, nil
}

func (s *server) DeleteSandbox(_ context.Context, in *sandboxv1.DeleteSandboxRequest, _ ...grpc.CallOption) (*sandboxv1.DeleteSandboxResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deleted = append(s.deleted, in.GetUid())
	if s.deleteIDs == nil {
		s.deleteIDs = map[string]bool{}
	}
	s.deleteIDs[in.GetRequestId()] = true
	return &sandboxv1.DeleteSandboxResponse{}, next(&s.deletes)
}

func (s *server) UpdateSandbox(_ context.Context, in *sandboxv1.UpdateSandboxRequest, _ ...grpc.CallOption) (*sandboxv1.UpdateSandboxResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.updates = append(s.updates, in)
	return &sandboxv1.UpdateSandboxResponse{}, nil
}

func typed(class error, reason fault.Reason) error {
	return rpc.ToStatus(fault.New(class, reason, "says the server").RetryIn(time.Millisecond))
}

func unsettled(class error, reason fault.Reason) error {
	return rpc.ToStatus(fault.Unsettled(fault.New(class, reason, "says the server").RetryIn(time.Millisecond)))
}

var errCut = status.Error(codes.Unavailable, "connection reset by peer")

func run(t *testing.T, s *server, lives ...plan.Life) []audit.Call {
	t.Helper()
	r := &load.Runner{Clients: []sandboxv1.SandboxServiceClient{s, s}, Log: &load.Log{}, Clock: clock.RealClock{}, Namespace: "default", Pool: "p", Image: "i", Prefix: "x-"}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	r.Run(ctx, lives)
	require.NoError(t, ctx.Err())
	return r.Log.Calls()
}

func TestAnswers(t *testing.T) {
	notFound := typed(errdefs.ErrNotFound, fault.SandboxNotFound)
	kept, short := plan.Life{Name: "a"}, plan.Life{Name: "a", DeleteAfter: time.Millisecond}
	type line struct {
		op       audit.Op
		outcome  audit.Outcome
		requests int
		unsure   bool
	}
	tests := []struct {
		name             string
		life             plan.Life
		creates, deletes []error
		want             []line
	}{
		{"acknowledged and kept", kept, nil, nil, []line{{audit.Create, audit.Acked, 1, false}}},
		{"acknowledged and deleted", short, nil, nil, []line{{audit.Create, audit.Acked, 1, false}, {audit.Delete, audit.Acked, 1, false}}},
		{"typed refusal is final", kept, []error{typed(errdefs.ErrInvalidArgument, fault.InvalidField)}, nil, []line{{audit.Create, audit.Refused, 1, false}}},
		{"typed unavailability is repeated", kept, []error{typed(errdefs.ErrUnavailable, fault.AgentUnavailable), nil}, nil, []line{{audit.Create, audit.Acked, 2, false}}},
		{"no capacity is repeated", kept, []error{typed(errdefs.ErrResourceExhausted, fault.NoCapacity), nil}, nil, []line{{audit.Create, audit.Acked, 2, false}}},
		{"a broken connection is repeated", kept, []error{errCut, nil}, nil, []line{{audit.Create, audit.Acked, 2, true}}},
		{"an unknown outcome is repeated", kept, []error{unsettled(errdefs.ErrResourceExhausted, fault.NoCapacity), nil}, nil, []line{{audit.Create, audit.Acked, 2, true}}},
		{"a refusal of unknown outcome is deleted by name", kept, []error{unsettled(errdefs.ErrNotFound, fault.ImageNotFound)}, nil,
			[]line{{audit.Create, audit.Refused, 1, true}, {audit.Delete, audit.Acked, 1, false}}},
		{"an internal error is no answer", kept, []error{typed(errdefs.ErrInternal, fault.Internal), nil}, nil, []line{{audit.Create, audit.Acked, 2, true}}},
		{"a refusal after silence is deleted by name", kept, []error{errCut, typed(errdefs.ErrAborted, fault.SandboxTerminating)}, nil,
			[]line{{audit.Create, audit.Refused, 2, true}, {audit.Delete, audit.Acked, 1, false}}},
		{"not found is an answer to a delete by name", kept, []error{errCut, typed(errdefs.ErrAborted, fault.SandboxTerminating)}, []error{notFound},
			[]line{{audit.Create, audit.Refused, 2, true}, {audit.Delete, audit.Acked, 1, false}}},
		{"a delete that finds nothing at once is denied", short, nil, []error{notFound},
			[]line{{audit.Create, audit.Acked, 1, false}, {audit.Delete, audit.Refused, 1, false}}},
		{"a repeated delete that finds nothing is done", short, nil, []error{errCut, notFound},
			[]line{{audit.Create, audit.Acked, 1, false}, {audit.Delete, audit.Acked, 2, true}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := &server{creates: tt.creates, deletes: tt.deletes}
			var got []line
			for _, c := range run(t, s, tt.life) {
				got = append(got, line{c.Op, c.Outcome, c.Requests, c.Unsure})
			}
			require.Equal(t, tt.want, got)
			require.Len(t, s.createIDs, 1, "a create is repeated under one request_id")
		})
	}
}

func TestTwiceIsOneRequest(t *testing.T) {
	s := &server{}
	calls := run(t, s, plan.Life{Name: "a", Twice: true})
	require.Len(t, calls, 2)
	require.Equal(t, map[string]int{"x-0": 2}, s.createIDs)
}

func TestOvertakingDeleteIsRepeated(t *testing.T) {
	s := &server{deletes: []error{typed(errdefs.ErrNotFound, fault.SandboxNotFound), nil}}
	calls := run(t, s, plan.Life{Name: "a", Overtake: time.Millisecond, DeleteAfter: time.Hour})
	require.Len(t, calls, 3)
	require.Equal(t, audit.Delete, calls[2].Op)
	require.Equal(t, []string{"", ""}, s.deleted, "by name: the uid is unknown")
	require.Len(t, s.deleteIDs, 2, "an earlier request_id would be answered and not executed")
}

func TestDeleteByUID(t *testing.T) {
	s := &server{}
	run(t, s, plan.Life{Name: "a", DeleteAfter: time.Millisecond})
	require.Equal(t, []string{"uid-x-a"}, s.deleted)
}

func TestStepsBecomeUpdates(t *testing.T) {
	s := &server{}
	calls := run(t, s, plan.Life{Name: "a", Steps: []plan.Step{{What: plan.SetLabel}, {What: plan.MoveExpiry}, {What: plan.RemoveExpiry}, {What: plan.FlipPolicy}, {What: plan.Reset}}})
	require.Len(t, calls, 6)
	var paths []string
	for _, u := range s.updates {
		paths = append(paths, u.GetUpdateMask().GetPaths()...)
		require.Equal(t, "uid-x-a", u.GetSandbox().GetUid())
	}
	require.Equal(t, []string{"labels", "spec.expire_time", "spec.expire_time", "spec.failure_policy", "spec.reset_revision"}, paths)
	require.NotNil(t, calls[1].Change.Label)
	require.True(t, calls[3].Change.ExpireTime.IsZero())
	require.True(t, *calls[4].Change.AutoRecreate)
	require.NotNil(t, calls[5].Change.Reset)
}

func TestDeleteAll(t *testing.T) {
	s := &server{}
	r := &load.Runner{Clients: []sandboxv1.SandboxServiceClient{s}, Log: &load.Log{}, Clock: clock.RealClock{}, Prefix: "x-"}
	lives := []plan.Life{{Index: 0, Name: "a"}, {Index: 1, Name: "b", DeleteAfter: time.Millisecond}}
	r.Run(t.Context(), lives)
	r.DeleteAll(t.Context(), lives)
	require.ElementsMatch(t, []string{"uid-x-a", "uid-x-b"}, s.deleted, "each once")
}

func TestRunEndsWithItsContext(t *testing.T) {
	s := &server{creates: []error{errCut}}
	r := &load.Runner{Clients: []sandboxv1.SandboxServiceClient{s}, Log: &load.Log{}, Clock: clock.RealClock{}, Prefix: "x-"}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	r.Run(ctx, []plan.Life{{Name: "a"}})
	require.Empty(t, r.Log.Calls(), "nothing begins after the end")
}

// The phases of a create say what it waited for.
func TestPhases(t *testing.T) {
	s := &server{creates: []error{typed(errdefs.ErrUnavailable, fault.AgentUnavailable), errCut, nil}}
	calls := run(t, s, plan.Life{Name: "a"})
	var names []string
	for _, p := range calls[0].Phases {
		names = append(names, p.Name)
	}
	require.Equal(t, []string{
		"request: AGENT_UNAVAILABLE", "wait: AGENT_UNAVAILABLE", "request: Unavailable", "wait: Unavailable", "request: OK", "stage: reserve",
		"outside the stages",
	}, names)
	require.Equal(t, "connection reset by peer", calls[0].Phases[2].Message)
	require.InDelta(t, 3, calls[0].Phases[5].Millis, 0)
	require.False(t, calls[0].Due.IsZero())
}

func TestQuantiles(t *testing.T) {
	require.Zero(t, (&load.Log{}).Quantile(0.99))
}
