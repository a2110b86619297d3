package writer_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/writer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// resources answers creates from a script, the last answer for ever, and holds one custom resource.
type resources struct {
	mu      sync.Mutex
	answers []error
	creates int
	there   *v1alpha1.Sandbox
}

func (r *resources) Create(context.Context, client.Object, ...client.CreateOption) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := min(r.creates, len(r.answers)-1)
	r.creates++
	return r.answers[i]
}

func (r *resources) Get(_ context.Context, _ client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	if r.there == nil {
		return apierrors.NewNotFound(schema.GroupResource{Group: v1alpha1.Group, Resource: "sandboxes"}, "one")
	}
	r.there.DeepCopyInto(obj.(*v1alpha1.Sandbox))
	return nil
}

func (r *resources) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.creates
}

func sandbox(uid string) *v1alpha1.Sandbox {
	return &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "one", Annotations: map[string]string{v1alpha1.AnnotationSandboxUID: uid}}}
}

// leading is the answer of a process that leads.
func leading(context.Context) (bool, error) { return true, nil }

// runTasks returns a set of tasks that runs until the end of the test, and the context of its tasks.
func runTasks(t *testing.T) (context.Context, *tasks.Set) {
	t.Helper()
	set := tasks.New()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = set.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return ctx, set
}

func TestOutcomes(t *testing.T) {
	kind := schema.GroupResource{Group: v1alpha1.Group, Resource: "sandboxes"}
	refused := &net.OpError{Op: "dial", Err: errors.New("refused")}
	lost := context.DeadlineExceeded
	exists := apierrors.NewAlreadyExists(kind, "one")
	forbidden := apierrors.NewForbidden(kind, "one", errors.New("exceeded quota"))
	tests := map[string]struct {
		answers []error
		there   *v1alpha1.Sandbox
		want    writer.Outcome // Pending: never done by itself
		stopped writer.Outcome
	}{
		"at once":                               {answers: []error{nil}, want: writer.Landed},
		"after some failures":                   {answers: []error{refused, lost, nil}, want: writer.Landed},
		"an answer was lost, and it is ours":    {answers: []error{lost, exists}, there: sandbox("u"), want: writer.Landed},
		"another's":                             {answers: []error{exists}, there: sandbox("other"), want: writer.Conflict},
		"the namespace is gone":                 {answers: []error{apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, "ns")}, want: writer.Conflict},
		"the kind is not installed (yet)":       {answers: []error{apierrors.NewNotFound(kind, "")}, stopped: writer.NotWritten},
		"never reached":                         {answers: []error{refused}, stopped: writer.NotWritten},
		"no clear answer":                       {answers: []error{lost, refused}, stopped: writer.Unknown},
		"the API server does not know the role": {answers: []error{apierrors.NewServiceUnavailable("forbidden")}, stopped: writer.Unknown},
		"admission refuses it":                  {answers: []error{forbidden}, want: writer.Rejected},
		"it is invalid":                         {answers: []error{apierrors.NewInvalid(v1alpha1.GroupVersion.WithKind("Sandbox").GroupKind(), "one", nil)}, want: writer.Rejected},
		"admission refuses another's name":      {answers: []error{forbidden}, there: sandbox("other"), want: writer.Rejected},
		"refused, but an earlier one landed":    {answers: []error{lost, forbidden}, there: sandbox("u"), want: writer.Landed},
		"refused after an answer was lost":      {answers: []error{lost, forbidden}, want: writer.Rejected},
	}
	for name, test := range tests {
		t.Run(name, inBubble(func(t *testing.T) {
			ctx, set := runTasks(t)
			r := &resources{answers: test.answers, there: test.there}
			w := writer.New(writer.Config{Resources: r, Tasks: set, Clock: clock.RealClock{}, Limit: 1, Confirm: leading, Dead: func(*v1alpha1.Sandbox) bool { return false }})
			require.NoError(t, w.Admit())
			require.Error(t, w.Admit(), "the room is bounded")
			after := make(chan writer.Outcome, 1)
			job := w.Write(sandbox("u"), func(_ context.Context, o writer.Outcome, _ *v1alpha1.Sandbox) { after <- o })
			want := test.want
			var got writer.Outcome
			var err error
			if want == writer.Pending {
				want = test.stopped
				<-time.After(time.Minute)
				require.Greater(t, r.count(), len(test.answers))
				got, _, err = job.Stop(ctx)
				sent := r.count()
				<-time.After(time.Hour)
				require.Equal(t, sent, r.count(), "nothing is sent after Stop")
			} else {
				got, _, err = job.Wait(ctx)
			}
			require.NoError(t, err)
			require.Equal(t, want, got)
			require.Equal(t, want, <-after)
			require.Equal(t, want == writer.Rejected, job.Cause() != nil)
			synctest.Wait()
			require.Zero(t, w.Pending())
		}))
	}
}

// inBubble runs a test on the clock of a synctest bubble: time passes only while everything waits.
func inBubble(test func(t *testing.T)) func(t *testing.T) {
	return func(t *testing.T) { synctest.Test(t, test) }
}

// TestCapacityIsReleasedAfterWrite: the work after a write may wait long for an agent, and is not a pending write.
func TestCapacityIsReleasedAfterWrite(t *testing.T) {
	inBubble(func(t *testing.T) {
		ctx, set := runTasks(t)
		w := writer.New(writer.Config{
			Resources: &resources{answers: []error{nil}}, Tasks: set, Clock: clock.RealClock{}, Limit: 1, Confirm: leading,
		})
		require.NoError(t, w.Admit())
		job := w.Write(sandbox("u"), func(ctx context.Context, _ writer.Outcome, _ *v1alpha1.Sandbox) { <-ctx.Done() })
		got, _, err := job.Wait(ctx)
		require.NoError(t, err)
		require.Equal(t, writer.Landed, got)
		synctest.Wait()
		require.Zero(t, w.Pending())
		require.NoError(t, w.Admit())
	})(t)
}

// TestWritesWaitForLeadership: the writes of a process that does not lead, or does not know whether it still does because it was
// suspended, wait. One that is stopped meanwhile was never sent.
func TestWritesWaitForLeadership(t *testing.T) {
	for name, unsure := range map[string]error{"standby": nil, "suspended": errors.New("the Lease cannot be read")} {
		t.Run(name, inBubble(func(t *testing.T) {
			ctx, set := runTasks(t)
			var leads atomic.Bool
			r := &resources{answers: []error{nil}}
			w := writer.New(writer.Config{Resources: r, Tasks: set, Clock: clock.RealClock{}, Limit: 2, Confirm: func(context.Context) (bool, error) {
				if leads.Load() {
					return true, nil
				}
				return false, unsure
			}})
			nothing := func(context.Context, writer.Outcome, *v1alpha1.Sandbox) {}
			w.AdmitAlways()
			first := w.Write(sandbox("u"), nothing)
			w.AdmitAlways()
			second := w.Write(sandbox("v"), nothing)
			<-time.After(time.Hour)
			require.Zero(t, r.count())
			got, _, err := first.Stop(ctx)
			require.NoError(t, err)
			require.Equal(t, writer.NotWritten, got)
			leads.Store(true)
			got, there, err := second.Wait(ctx)
			require.NoError(t, err)
			require.Equal(t, writer.Landed, got)
			require.Equal(t, "v", there.EffectiveUID())
			require.Equal(t, 1, r.count())
		}))
	}
}

// TestNameOfDeletedSandboxIsAwaited: a custom resource that is being deleted keeps its name for a while.
func TestNameOfDeletedSandboxIsAwaited(t *testing.T) {
	exists := apierrors.NewAlreadyExists(schema.GroupResource{Group: v1alpha1.Group, Resource: "sandboxes"}, "one")
	going := sandbox("other")
	now := metav1.Now()
	going.DeletionTimestamp = &now
	for name, test := range map[string]struct {
		there *v1alpha1.Sandbox
		dead  bool
	}{"being deleted": {going, false}, "known to be deleted": {sandbox("other"), true}} {
		t.Run(name, inBubble(func(t *testing.T) {
			ctx, set := runTasks(t)
			r := &resources{answers: []error{exists, exists, nil}, there: test.there}
			w := writer.New(writer.Config{
				Resources: r, Tasks: set, Clock: clock.RealClock{}, Limit: 1, Confirm: leading, Dead: func(*v1alpha1.Sandbox) bool { return test.dead },
			})
			w.AdmitAlways()
			got, _, err := w.Write(sandbox("u"), func(context.Context, writer.Outcome, *v1alpha1.Sandbox) {}).Wait(ctx)
			require.NoError(t, err)
			require.Equal(t, writer.Landed, got)
			require.Equal(t, 3, r.count())
		}))
	}
}

// What is deleted while its answer still goes first is never written.
func TestAnswerPrecedesWrite(t *testing.T) {
	ctx, set := runTasks(t)
	r := &resources{answers: []error{nil}}
	w := writer.New(writer.Config{
		Resources: r, Tasks: set, Clock: clock.RealClock{}, Limit: 1, Confirm: leading, YieldDelay: time.Hour,
	})
	require.NoError(t, w.Admit())
	job := w.Write(sandbox("u"), func(context.Context, writer.Outcome, *v1alpha1.Sandbox) {})
	got, _, err := job.Stop(ctx)
	require.NoError(t, err)
	require.Equal(t, writer.NotWritten, got)
	require.Zero(t, r.count())
}

// Creates that never end do not delay a write forever.
func TestYieldIsBounded(t *testing.T) {
	ctx, set := runTasks(t)
	var asked atomic.Int64
	r := &resources{answers: []error{nil}}
	w := writer.New(writer.Config{
		Resources: r, Tasks: set, Clock: clock.RealClock{}, Limit: 1, Confirm: leading,
		YieldDelay: time.Millisecond, MaxYield: 5 * time.Millisecond, Busy: func() bool { asked.Add(1); return true },
	})
	require.NoError(t, w.Admit())
	got, _, err := w.Write(sandbox("u"), func(context.Context, writer.Outcome, *v1alpha1.Sandbox) {}).Wait(ctx)
	require.NoError(t, err)
	require.Equal(t, writer.Landed, got)
	require.EqualValues(t, 4, asked.Load())
}
