package cmd_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// liveAllocator is a fake allocator that keeps sandboxes: create adds one, delete removes it, and watch sends the changes.
type liveAllocator struct {
	mu        sync.Mutex
	creates   []*sandboxv1.CreateSandboxRequest
	deletes   []*sandboxv1.DeleteSandboxRequest
	sandboxes map[string]*sandboxv1.Sandbox
	changed   chan struct{} // closed at each change
	code      int32
	output    []string
	hang      bool   // the process never ends
	waited    func() // is called during a create
	following chan struct{}
}

func newLiveAllocator(code int32, output ...string) *liveAllocator {
	return &liveAllocator{sandboxes: map[string]*sandboxv1.Sandbox{}, changed: make(chan struct{}), code: code, output: output, following: make(chan struct{}, 9)}
}

func (w *liveAllocator) fake() *fake {
	return &fake{create: w.create, remove: w.remove, watch: w.watch, logs: w.logs}
}

func (w *liveAllocator) change(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
	close(w.changed)
	w.changed = make(chan struct{})
}

func (w *liveAllocator) create(_ context.Context, in *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
	name := in.GetName()
	if name == "" {
		name = "made-up"
	}
	s := running(name)
	s.Namespace = in.GetNamespace()
	if w.waited != nil {
		w.waited()
	}
	w.change(func() {
		w.creates = append(w.creates, in)
		w.sandboxes[name] = s
	})
	return &sandboxv1.CreateSandboxResponse{
		Sandbox: s, Endpoints: s.GetStatus().GetEndpoints(), ConsistencyMode: sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST,
		StartPath: sandboxv1.StartPath_START_PATH_SLOT,
		Timings: []*sandboxv1.StageTiming{
			{Stage: "reserve", Duration: durationpb.New(12 * time.Microsecond)}, {Stage: "claim", Duration: durationpb.New(1300 * time.Microsecond)},
		},
	}, nil
}

func (w *liveAllocator) remove(_ context.Context, in *sandboxv1.DeleteSandboxRequest) (*sandboxv1.DeleteSandboxResponse, error) {
	var s *sandboxv1.Sandbox
	w.change(func() {
		w.deletes = append(w.deletes, in)
		s = w.sandboxes[in.GetName()]
		delete(w.sandboxes, in.GetName())
	})
	if s == nil {
		return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no sandbox %s", in.GetName())
	}
	return &sandboxv1.DeleteSandboxResponse{Sandbox: s}, nil
}

func (w *liveAllocator) watch(in *sandboxv1.WatchSandboxesRequest, stream sandboxv1.SandboxService_WatchSandboxesServer) error {
	var sent *sandboxv1.Sandbox
	synced := false
	for {
		w.mu.Lock()
		now, changed := w.sandboxes[in.GetName()], w.changed
		w.mu.Unlock()
		e := &sandboxv1.WatchSandboxesResponse{Sandbox: now, Type: sandboxv1.WatchSandboxesResponse_TYPE_MODIFIED}
		switch {
		case now == nil && sent != nil:
			e.Sandbox, e.Type = sent, sandboxv1.WatchSandboxesResponse_TYPE_DELETED
		case sent == nil:
			e.Type = sandboxv1.WatchSandboxesResponse_TYPE_ADDED
		}
		if now != sent {
			if err := stream.Send(e); err != nil {
				return err
			}
			sent = now
		}
		if !synced {
			if err := stream.Send(&sandboxv1.WatchSandboxesResponse{Type: sandboxv1.WatchSandboxesResponse_TYPE_SYNCED}); err != nil {
				return err
			}
			synced = true
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func (w *liveAllocator) logs(in *sandboxv1.StreamLogsRequest, stream sandboxv1.SandboxService_StreamLogsServer) error {
	for _, piece := range w.output {
		if err := stream.Send(&sandboxv1.StreamLogsResponse{Data: []byte(piece)}); err != nil {
			return err
		}
	}
	w.following <- struct{}{}
	if w.hang {
		<-stream.Context().Done()
		return stream.Context().Err()
	}
	w.change(func() {
		s := exited(in.GetName(), w.code)
		s.Namespace = in.GetNamespace()
		w.sandboxes[in.GetName()] = s
	})
	return nil
}

func TestRun(t *testing.T) {
	w := newLiveAllocator(0)
	b := start(t, w.fake())
	fakeClock := clocktesting.NewFakeClock(now)
	b.clock = fakeClock
	w.waited = func() { fakeClock.Step(6100 * time.Microsecond) }
	r := b.run(t, "run", "web", "--image", "img")
	require.Zero(t, r.code, r.err)
	require.Equal(t, "web\n10.0.0.3:80\n", r.out)
	require.Equal(t, `sandbox "web" started on agent-1 (node node-1, fast)
started in 6.1 ms (slot): reserve 0.01, claim 1.3, outside 4.8
`, r.err)

	r = b.run(t, "run", "-q", "--image", "img")
	require.Equal(t, "made-up\n", r.out)
	require.Empty(t, r.err)
	require.Empty(t, w.creates[1].GetName())
	require.Len(t, w.creates[1].GetRequestId(), 36)
	require.Empty(t, w.creates[1].GetSpec().GetPool(), "the server knows the default pool")
	require.NotEqual(t, w.creates[0].GetRequestId(), w.creates[1].GetRequestId())

	require.Equal(t, "sandbox/made-up\n", b.run(t, "run", "-o", "name", "--image", "img").out)
	asJSON := b.run(t, "run", "-o", "json", "--image", "img").out
	require.Contains(t, asJSON, `"timings": [`)
	require.Contains(t, asJSON, `"startPath": "START_PATH_SLOT"`)
	require.Empty(t, w.deletes)
}

func TestRunFlags(t *testing.T) {
	w := newLiveAllocator(0)
	b := start(t, w.fake())
	b.env["FSB_POOL"] = "from-env"
	r := b.run(t, "run", "web", "--image", "img", "-n", "ns", "--env", "A=b=c", "--env", "E=", "--port", "80", "--port", "81,82", "--label", "k=v",
		"--cpu", "1500m", "--memory", "128Mi", "--pids", "64", "--workdir", "/w", "--network", "none", "--strong", "--ttl", "10m", "--grace", "0s", "--ttl-after-finished", "1h",
		"--failure-policy", "auto-recreate", "--request-id", "r1", "--", "sh", "-c", "echo --rm")
	require.Zero(t, r.code, r.err)
	require.Empty(t, cmp.Diff(&sandboxv1.CreateSandboxRequest{
		Namespace: "ns", Name: "web", RequestId: "r1", Labels: map[string]string{"k": "v"},
		Spec: &sandboxv1.SandboxSpec{
			Image: "img", Pool: "from-env", Command: []string{"sh", "-c", "echo --rm"}, Env: map[string]string{"A": "b=c", "E": ""},
			Ports: []int32{80, 81, 82}, WorkingDir: "/w", Network: sandboxv1.NetworkMode_NETWORK_MODE_NONE,
			ConsistencyMode: sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG, FailurePolicy: sandboxv1.FailurePolicy_FAILURE_POLICY_AUTO_RECREATE,
			ExpireTime: timestamppb.New(now.Add(10 * time.Minute)), TerminationGracePeriod: durationpb.New(0), TtlAfterFinished: durationpb.New(time.Hour),
			Resources: &sandboxv1.ResourceLimits{CpuMillis: 1500, MemoryBytes: 128 << 20, Pids: 64},
		},
	}, w.creates[0], protocmp.Transform()))

	require.Zero(t, b.run(t, "run", "--image", "img", "--keep-entrypoint", "--pool", "mine", "--", "-v").code)
	require.Equal(t, []string{"-v"}, w.creates[1].GetSpec().GetArgs())
	require.Empty(t, w.creates[1].GetSpec().GetCommand())
	require.Equal(t, "mine", w.creates[1].GetSpec().GetPool())

	require.Zero(t, b.run(t, "run", "--image", "img", "--keep-alive").code)
	require.True(t, w.creates[2].GetSpec().GetKeepAlive())
	refused := b.run(t, "run", "--image", "img", "--keep-alive", "--", "sh")
	require.Equal(t, 2, refused.code)
	require.Contains(t, refused.err, "--keep-alive")
	require.Len(t, w.creates, 3)
}

const manifest = `
apiVersion: fast-sandbox.io/v1alpha1
kind: Sandbox
metadata: {name: declared, namespace: ns, labels: {a: b}}
spec:
  image: img
  poolRef: p
  command: [sleep, "1"]
  envs: [{name: A, value: b}]
  exposedPorts: [80]
`

func TestRunManifest(t *testing.T) {
	w := newLiveAllocator(0)
	b := start(t, w.fake())
	file := filepath.Join(t.TempDir(), "sandbox.yaml")
	require.NoError(t, os.WriteFile(file, []byte(manifest), 0o600))
	r := b.run(t, "run", "-f", file, "--image", "other", "--env", "C=d", "--", "true")
	require.Zero(t, r.code, r.err)
	got := w.creates[0]
	require.Equal(t, "ns", got.GetNamespace())
	require.Equal(t, "declared", got.GetName())
	require.Equal(t, "p", got.GetSpec().GetPool())
	require.Equal(t, "other", got.GetSpec().GetImage())
	require.Equal(t, []string{"true"}, got.GetSpec().GetCommand())
	require.Equal(t, map[string]string{"A": "b", "C": "d"}, got.GetSpec().GetEnv())
	require.Equal(t, []int32{80}, got.GetSpec().GetPorts())
	require.Equal(t, map[string]string{"a": "b"}, got.GetLabels())

	b.in = manifest
	require.Zero(t, b.run(t, "run", "-f", "-", "other-name").code)
	require.Equal(t, "other-name", w.creates[1].GetName())
	require.Equal(t, 2, b.run(t, "run", "-f", file, "-n", "elsewhere").code)
}

func TestRunAttach(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		code int32
		kept bool
	}{
		"rm":            {[]string{"--rm"}, 0, false},
		"rm and code":   {[]string{"--rm"}, 42, false},
		"attach":        {[]string{"-a"}, 7, true},
		"rm and attach": {[]string{"-a", "--rm"}, 255, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newLiveAllocator(c.code, "4", "2\n\x00")
			b := start(t, w.fake())
			r := b.run(t, append(append([]string{"run", "py", "--image", "img"}, c.args...), "--", "x")...)
			require.EqualValues(t, c.code, r.code, r.err)
			require.Equal(t, "42\n\x00", r.out)
			require.Contains(t, r.err, "started in ")
			require.NotContains(t, r.err, "error")
			require.Equal(t, c.kept, w.sandboxes["py"] != nil)
			if !c.kept {
				require.Equal(t, "uid-py", w.deletes[0].GetUid(), "never another sandbox of the same name")
			}
		})
	}
}

func TestRunRmDeletesOnCtrlC(t *testing.T) {
	w := newLiveAllocator(0)
	w.hang = true
	b := start(t, w.fake())
	ctx, interrupt := context.WithCancel(t.Context())
	done := make(chan result, 1)
	go func() { done <- b.runIn(ctx, "run", "py", "--image", "img", "--rm") }()
	<-w.following
	interrupt()
	r := <-done
	require.Equal(t, 130, r.code, r.err)
	require.Empty(t, w.sandboxes)
}

func TestRunAttachKeepsSandboxOnCtrlC(t *testing.T) {
	w := newLiveAllocator(0)
	w.hang = true
	b := start(t, w.fake())
	ctx, interrupt := context.WithCancel(t.Context())
	done := make(chan result, 1)
	go func() { done <- b.runIn(ctx, "run", "py", "--image", "img", "-a") }()
	<-w.following
	interrupt()
	r := <-done
	require.Equal(t, 130, r.code)
	require.Contains(t, r.err, `sandbox "py" is still running; delete it with: fsb-ctl delete -n default py`)
	require.NotNil(t, w.sandboxes["py"])
}

// TestRunRmDeletesOnCtrlCDuringCreate interrupts before the create has returned: the sandbox must be deleted.
func TestRunRmDeletesOnCtrlCDuringCreate(t *testing.T) {
	w := newLiveAllocator(0)
	f := w.fake()
	creating, answer := make(chan struct{}), make(chan struct{})
	f.create = func(ctx context.Context, in *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
		out, err := w.create(ctx, in)
		close(creating)
		<-answer
		return out, err
	}
	b := start(t, f)
	b.clock = clock.RealClock{}
	ctx, interrupt := context.WithCancel(t.Context())
	done := make(chan result, 1)
	go func() { done <- b.runIn(ctx, "run", "--image", "img", "--rm") }()
	<-creating
	interrupt()
	close(answer)
	require.Equal(t, 130, (<-done).code)
	require.Empty(t, w.sandboxes)
	require.Len(t, w.deletes, 1)
}

func TestRunRetriesWithOneRequestID(t *testing.T) {
	w := newLiveAllocator(0)
	f := w.fake()
	var ids []string
	f.create = func(ctx context.Context, in *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
		if ids = append(ids, in.GetRequestId()); len(ids) < 3 {
			return nil, fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "away").RetryIn(time.Millisecond)
		}
		return w.create(ctx, in)
	}
	b := start(t, f)
	b.clock = clock.RealClock{}
	require.Zero(t, b.run(t, "run", "--image", "img").code)
	require.Len(t, ids, 3)
	require.Equal(t, strings.Repeat(ids[0], 3), strings.Join(ids, ""))
}

func TestFailedPullsAreBounded(t *testing.T) {
	calls := 0
	b := start(t, &fake{create: func(context.Context, *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
		calls++
		return nil, fault.New(errdefs.ErrUnavailable, fault.ImagePullFailed, "registry away").RetryIn(time.Millisecond)
	}})
	b.clock = clock.RealClock{}
	r := b.run(t, "run", "--image", "img")
	require.Equal(t, 7, r.code)
	require.Contains(t, r.err, "(IMAGE_PULL_FAILED)")
	require.Equal(t, 3, calls)
}
