// Package fakeagent is a scriptable agent in memory, for tests: it keeps AgentService's contract (fences, tombstones,
// capacity, status stream) without a container. All methods may be called concurrently.
package fakeagent

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

type key struct {
	uid     string
	attempt int64
}

// Agent is one fake agent. The hooks may be set before it serves.
type Agent struct {
	agentv1.UnimplementedAgentServiceServer

	// OnCreate runs after admission and may fail the create; it gets the call's context.
	OnCreate func(ctx context.Context, r *agentv1.SandboxRecord) error
	// OnStarted runs after STARTED is reached and before it is sent; an error breaks the stream with the sandbox running.
	OnStarted func(ctx context.Context, r *agentv1.SandboxRecord) error
	// OnDelete runs before a deletion and may fail it.
	OnDelete func(ctx context.Context, f *agentv1.Fence) error
	// OnRemove runs in a deletion, after its tombstone is kept and SIGTERM sent, and before the container is gone.
	OnRemove func(f *agentv1.Fence)
	// OnMark runs before a sandbox is marked persisted and may fail that.
	OnMark func(ctx context.Context, f *agentv1.Fence) error
	// Heartbeat is the interval of the status stream.
	Heartbeat time.Duration
	// Skip makes the status stream skip a number after its snapshot, once.
	Skip bool

	info *agentv1.AgentInfo

	mu             sync.Mutex
	epoch          int
	sandboxes      map[key]*agentv1.SandboxReport
	tombs          map[key]bool
	images         []string
	accepting      bool
	watchers       map[chan *agentv1.AgentDelta]struct{}
	creates        int
	deletes        []*agentv1.Fence
	deleteRequests []*agentv1.DeleteSandboxRequest
	watches        int

	slots *agentv1.SlotStatus // immutable value; nil: it knows none

	terms      map[rpc.Role]int64
	superseded int
	tombstones map[key]*agentv1.Tombstone
	forgotten  int
}

// New returns an agent that has the info's capacity and the images.
func New(info *agentv1.AgentInfo, images ...string) *Agent {
	return &Agent{
		info: info, images: images, accepting: true, Heartbeat: 50 * time.Millisecond, epoch: 1,
		sandboxes: map[key]*agentv1.SandboxReport{}, tombs: map[key]bool{}, watchers: map[chan *agentv1.AgentDelta]struct{}{},
		terms: map[rpc.Role]int64{}, tombstones: map[key]*agentv1.Tombstone{},
	}
}

// Serve serves on a listener until ctx ends.
func (a *Agent) Serve(ctx context.Context, l net.Listener, tls rpc.TLS) error {
	server, err := rpc.NewServer(ctx, rpc.ServerConfig{Listener: l, TLS: tls, DrainTimeout: 10 * time.Millisecond, Guard: a.guard})
	if err != nil {
		return err
	}
	agentv1.RegisterAgentServiceServer(server, a)
	return server.Run(ctx)
}

func keyOf(f *agentv1.Fence) key { return key{f.GetSandboxUid(), f.GetAttempt()} }

func (a *Agent) fence(f *agentv1.Fence) error {
	if f.GetAgentUid() != a.info.GetPodUid() {
		return fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "this agent is %s", a.info.GetPodUid())
	}
	return nil
}

// set stores a report and tells watchers. The lock is held.
func (a *Agent) set(r *agentv1.SandboxReport) {
	k := keyOf(r.GetRecord().GetFence())
	if r.GetState() == agentv1.SandboxState_SANDBOX_STATE_TERMINATED {
		delete(a.sandboxes, k)
	} else {
		a.sandboxes[k] = r
	}
	a.tell(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{r}})
}

// buried tells whether a container was deleted, or its sandbox has a tombstone. The lock is held.
func (a *Agent) buried(k key) bool {
	for t := range a.tombstones {
		if t.uid == k.uid && k.attempt <= t.attempt {
			return true
		}
	}
	return a.tombs[k]
}

func (a *Agent) tell(d *agentv1.AgentDelta) {
	for w := range a.watchers {
		w <- d
	}
}

// CreateSandbox implements agentv1.AgentServiceServer.
func (a *Agent) CreateSandbox(req *agentv1.CreateSandboxRequest, stream grpc.ServerStreamingServer[agentv1.CreateSandboxResponse]) error {
	record := req.GetRecord()
	k := keyOf(record.GetFence())
	if err := a.fence(record.GetFence()); err != nil {
		return err
	}
	a.mu.Lock()
	a.creates++
	switch {
	case a.buried(k):
		a.mu.Unlock()
		return fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "deleted")
	case !a.accepting:
		a.mu.Unlock()
		return fault.New(errdefs.ErrUnavailable, fault.AgentDraining, "draining")
	case len(a.sandboxes) >= int(a.info.GetCapacity()):
		a.mu.Unlock()
		return fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full")
	}
	report := &agentv1.SandboxReport{
		Record: record, State: agentv1.SandboxState_SANDBOX_STATE_CREATING,
		ContainerId: k.uid + "-" + strconv.FormatInt(k.attempt, 10), Persisted: req.GetPersisted(),
	}
	a.set(report)
	a.mu.Unlock()
	if err := stream.Send(&agentv1.CreateSandboxResponse{Stage: agentv1.CreateStage_CREATE_STAGE_ADMITTED}); err != nil {
		a.drop(k)
		return err
	}
	if a.OnCreate != nil {
		if err := a.OnCreate(stream.Context(), record); err != nil {
			a.drop(k)
			return err
		}
	}
	if stream.Context().Err() != nil {
		a.drop(k)
		return stream.Context().Err()
	}
	stage, path := a.claim()
	if err := stream.Send(&agentv1.CreateSandboxResponse{Stage: stage, Duration: durationpb.New(2 * time.Millisecond)}); err != nil {
		a.drop(k)
		return err
	}
	report = a.started(k, report, path)
	if report == nil {
		return fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "deleted")
	}
	if a.OnStarted != nil {
		if err := a.OnStarted(stream.Context(), record); err != nil {
			return err
		}
	}
	return stream.Send(&agentv1.CreateSandboxResponse{
		Stage: agentv1.CreateStage_CREATE_STAGE_STARTED, Duration: durationpb.New(time.Millisecond), Report: report,
	})
}

func (a *Agent) started(k key, report *agentv1.SandboxReport, path sandboxv1.StartPath) *agentv1.SandboxReport {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.tombs[k] {
		return nil
	}
	report = proto.CloneOf(report)
	report.State = agentv1.SandboxState_SANDBOX_STATE_RUNNING
	report.StartTime, report.StartPath = timestamppb.Now(), path
	for _, p := range report.GetRecord().GetSpec().GetPorts() {
		report.Endpoints = append(report.Endpoints, fmt.Sprintf("%s:%d", a.info.GetPodIp(), p))
	}
	a.set(report)
	return report
}

func (a *Agent) drop(k key) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if r, ok := a.sandboxes[k]; ok {
		r = proto.CloneOf(r)
		r.State = agentv1.SandboxState_SANDBOX_STATE_TERMINATED
		a.set(r)
	}
}

// MarkPersisted implements agentv1.AgentServiceServer.
func (a *Agent) MarkPersisted(ctx context.Context, req *agentv1.MarkPersistedRequest) (*agentv1.MarkPersistedResponse, error) {
	if a.OnMark != nil {
		if err := a.OnMark(ctx, req.GetFence()); err != nil {
			return nil, err
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	r, ok := a.sandboxes[keyOf(req.GetFence())]
	if !ok {
		return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no such sandbox")
	}
	r = proto.CloneOf(r)
	r.Persisted = true
	a.set(r)
	return &agentv1.MarkPersistedResponse{}, nil
}

// WatchStatus implements agentv1.AgentServiceServer.
func (a *Agent) WatchStatus(_ *agentv1.WatchStatusRequest, stream grpc.ServerStreamingServer[agentv1.WatchStatusResponse]) error {
	deltas := make(chan *agentv1.AgentDelta, 4096)
	a.mu.Lock()
	a.watches++
	skip := a.Skip
	a.Skip = false
	epoch := strconv.Itoa(a.epoch)
	snapshot := &agentv1.AgentSnapshot{Info: a.info, Images: a.images, Accepting: a.accepting, Slots: a.slots}
	for _, t := range a.tombstones {
		snapshot.Tombstones = append(snapshot.Tombstones, t)
	}
	for _, r := range a.sandboxes {
		snapshot.Sandboxes = append(snapshot.Sandboxes, r)
	}
	a.watchers[deltas] = struct{}{}
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.watchers, deltas)
	}()
	ticker := time.NewTicker(a.Heartbeat)
	defer ticker.Stop()
	m := &agentv1.WatchStatusResponse{Content: &agentv1.WatchStatusResponse_Snapshot{Snapshot: snapshot}}
	for sequence := int64(1); ; sequence++ {
		if skip && sequence == 2 {
			sequence++
		}
		m.Epoch, m.Sequence, m.Time = epoch, sequence, timestamppb.Now()
		if err := stream.Send(m); err != nil {
			return err
		}
		m = &agentv1.WatchStatusResponse{}
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case d := <-deltas:
			m.Content = &agentv1.WatchStatusResponse_Delta{Delta: d}
		case <-ticker.C:
		}
	}
}

// StreamLogs implements agentv1.AgentServiceServer: it sends the container's id.
func (a *Agent) StreamLogs(req *agentv1.StreamLogsRequest, stream grpc.ServerStreamingServer[agentv1.StreamLogsResponse]) error {
	a.mu.Lock()
	r, ok := a.sandboxes[keyOf(req.GetFence())]
	a.mu.Unlock()
	if !ok {
		return fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no such sandbox")
	}
	return stream.Send(&agentv1.StreamLogsResponse{Data: []byte(r.GetContainerId())})
}

// Stop makes a sandbox's process end with a code.
func (a *Agent) Stop(uid string, code int32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for k, r := range a.sandboxes {
		if k.uid == uid {
			r = proto.CloneOf(r)
			r.State, r.ExitCode = agentv1.SandboxState_SANDBOX_STATE_STOPPED, proto.Int32(code)
			a.set(r)
		}
	}
}

// Put makes the agent have a sandbox, as if a former allocator had created it.
func (a *Agent) Put(r *agentv1.SandboxReport) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.set(r)
}

// Sandboxes returns the reports of all sandboxes.
func (a *Agent) Sandboxes() []*agentv1.SandboxReport {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []*agentv1.SandboxReport
	for _, r := range a.sandboxes {
		out = append(out, r)
	}
	return out
}

// Creates is how many creates came in.
func (a *Agent) Creates() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.creates
}

// Deletes are the fences of the deletes that were carried out.
func (a *Agent) Deletes() []*agentv1.Fence {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]*agentv1.Fence(nil), a.deletes...)
}

// Watches is how many status streams were opened.
func (a *Agent) Watches() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.watches
}
