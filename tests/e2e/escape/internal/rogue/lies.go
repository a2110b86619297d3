package rogue

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// Lies is what a hostile agent knows of a sandbox of another tenant, about which it lies. It is in the variable LiesEnv, as JSON.
type Lies struct {
	// Namespace, Pool, Name, UID, Attempt, AgentPod, AgentUID and AgentAddress are those of the other tenant's sandbox.
	Namespace, Pool, Name, UID, AgentPod, AgentUID, AgentAddress string
	Attempt                                                      int64
	// Image is one that exists nowhere.
	Image string
}

// LiesEnv is the variable that has the lies.
const LiesEnv = "ESCAPE_LIES"

// Names of the sandboxes that the agent invents: in the namespace of the other tenant, in its own with the uid of the other, and in an
// answer to a create.
const (
	PlantedForeign = "planted-foreign"
	PlantedUID     = "planted-uid"
	PlantedAnswer  = "planted-answer"
)

// ParseLies reads the lies.
func ParseLies(text string) (*Lies, error) {
	l := &Lies{}
	if err := json.Unmarshal([]byte(text), l); err != nil {
		return nil, fmt.Errorf("reading %s: %w", LiesEnv, err)
	}
	return l, nil
}

// String returns the JSON.
func (l *Lies) String() string {
	raw, err := json.Marshal(l)
	if err != nil { // it has texts and numbers alone
		panic(err)
	}
	return string(raw)
}

// Info is what the agent says that it is: the agent of the other tenant, with capacity for everything.
func (l *Lies) Info(own *agentv1.AgentInfo) *agentv1.AgentInfo {
	lie := proto.CloneOf(own)
	lie.Namespace, lie.Pool, lie.PodName, lie.PodUid, lie.NodeName, lie.Capacity = l.Namespace, l.Pool, l.AgentPod, l.AgentUID, "elsewhere", 1_000_000
	return lie
}

// record is the record of a sandbox that does not exist.
func record(namespace, name, uid, agentUID, pool string, attempt int64) *agentv1.SandboxRecord {
	return &agentv1.SandboxRecord{
		Fence: &agentv1.Fence{SandboxUid: uid, Attempt: attempt, AgentUid: agentUID}, Namespace: namespace, Name: name, CreateTime: timestamppb.Now(),
		RequestId: "planted-" + name, Spec: &sandboxv1.SandboxSpec{Image: "docker.io/fast-sandbox/busybox:demo", Pool: pool, Command: []string{"sleep", "1d"}},
	}
}

func report(r *agentv1.SandboxRecord, state agentv1.SandboxState, persisted bool) *agentv1.SandboxReport {
	out := &agentv1.SandboxReport{
		Record: r, State: state, ContainerId: identity.FenceOf(r.GetFence()).ContainerID(), Persisted: persisted, StartTime: timestamppb.Now(),
	}
	if state == agentv1.SandboxState_SANDBOX_STATE_STOPPED {
		out.ExitCode, out.FinishTime, out.Reason = proto.Int32(137), timestamppb.Now(), "Error"
	}
	return out
}

// uid returns a uid that no sandbox has.
func uid(n int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", n) }

// Reports are the agent's reports: that the other tenant's sandbox has ended, by the fence of its own agent and by one of this agent, and
// that sandboxes run whose resources were never written.
func (l *Lies) Reports(own *agentv1.AgentInfo) []*agentv1.SandboxReport {
	stopped, running := agentv1.SandboxState_SANDBOX_STATE_STOPPED, agentv1.SandboxState_SANDBOX_STATE_RUNNING
	superseding := record(own.GetNamespace(), "superseding", uid(3), own.GetPodUid(), own.GetPool(), 1)
	superseding.Superseded = []*agentv1.SupersededAttempt{l.attempt()}
	return []*agentv1.SandboxReport{
		report(record(l.Namespace, l.Name, l.UID, l.AgentUID, l.Pool, l.Attempt), stopped, true),
		report(record(l.Namespace, l.Name, l.UID, own.GetPodUid(), l.Pool, l.Attempt), stopped, true),
		report(record(l.Namespace, l.Name, l.UID, own.GetPodUid(), l.Pool, l.Attempt+1), running, true),
		report(record(l.Namespace, PlantedForeign, uid(1), own.GetPodUid(), l.Pool, 1), running, false),
		report(record(own.GetNamespace(), PlantedUID, l.UID, own.GetPodUid(), own.GetPool(), l.Attempt), running, false),
		report(superseding, running, false),
	}
}

func (l *Lies) fence(agentUID string) *agentv1.Fence {
	return &agentv1.Fence{SandboxUid: l.UID, Attempt: l.Attempt, AgentUid: agentUID}
}

// attempt names the container of the other tenant as one that this agent's sandbox has superseded.
func (l *Lies) attempt() *agentv1.SupersededAttempt {
	return &agentv1.SupersededAttempt{Fence: l.fence(l.AgentUID), AgentPod: l.AgentPod, AgentAddress: l.AgentAddress}
}

// Tombstones say that the other tenant's sandbox was deleted.
func (l *Lies) Tombstones(own *agentv1.AgentInfo) []*agentv1.Tombstone {
	now := timestamppb.Now()
	return []*agentv1.Tombstone{
		{Fence: l.fence(l.AgentUID), Namespace: l.Namespace, Name: l.Name, DeleteTime: now},
		{Fence: l.fence(own.GetPodUid()), Namespace: l.Namespace, Name: l.Name, DeleteTime: now},
		{Fence: l.fence(own.GetPodUid()), Namespace: own.GetNamespace(), Name: l.Name, DeleteTime: now},
		{Fence: &agentv1.Fence{SandboxUid: uid(4), Attempt: 1, AgentUid: own.GetPodUid()}, Namespace: own.GetNamespace(), Name: "superseding",
			DeleteTime: now, Superseded: []*agentv1.SupersededAttempt{l.attempt()}},
	}
}

// Answer is the agent's report on a sandbox that it was asked to create: another one, in the other tenant's namespace.
func (l *Lies) Answer(own *agentv1.SandboxReport) *agentv1.SandboxReport {
	lie := proto.CloneOf(own)
	lie.Record.Namespace, lie.Record.Name = l.Namespace, PlantedAnswer
	lie.Endpoints = []string{l.AgentAddress}
	return lie
}

// Service returns a service that lies wherever the other one says the truth.
func (l *Lies) Service(own *agentv1.AgentInfo, truth agentv1.AgentServiceServer) agentv1.AgentServiceServer {
	return &liar{AgentServiceServer: truth, lies: l, info: own}
}

type liar struct {
	agentv1.AgentServiceServer
	lies *Lies
	info *agentv1.AgentInfo

	// known has the addresses of allocators that have watched before.
	known sync.Map
}

// claimed is what the agent says that it is to an allocator. Nothing of an agent with another uid is believed, so that it lies about its
// uid to each allocator only once: its other lies would have no effect.
func (s *liar) claimed(ctx context.Context) *agentv1.AgentInfo {
	lie := s.lies.Info(s.info)
	if p, ok := peer.FromContext(ctx); ok {
		from := p.Addr.String()
		if host, _, err := net.SplitHostPort(from); err == nil {
			from = host
		}
		if _, again := s.known.LoadOrStore(from, true); again {
			lie.PodUid = s.info.GetPodUid()
		}
	}
	return lie
}

// WatchStatus implements agentv1.AgentServiceServer.
func (s *liar) WatchStatus(req *agentv1.WatchStatusRequest, stream grpc.ServerStreamingServer[agentv1.WatchStatusResponse]) error {
	info := s.claimed(stream.Context())
	return s.AgentServiceServer.WatchStatus(req, lyingStream[agentv1.WatchStatusResponse]{stream, func(m *agentv1.WatchStatusResponse) *agentv1.WatchStatusResponse {
		if m.GetSnapshot() == nil {
			return m
		}
		m = proto.CloneOf(m)
		snapshot := m.GetSnapshot()
		snapshot.Info = info
		snapshot.Images = append(snapshot.Images, s.lies.Image)
		snapshot.Sandboxes = append(snapshot.Sandboxes, s.lies.Reports(s.info)...)
		snapshot.Tombstones = append(snapshot.Tombstones, s.lies.Tombstones(s.info)...)
		return m
	}})
}

// CreateSandbox implements agentv1.AgentServiceServer.
func (s *liar) CreateSandbox(req *agentv1.CreateSandboxRequest, stream grpc.ServerStreamingServer[agentv1.CreateSandboxResponse]) error {
	return s.AgentServiceServer.CreateSandbox(req, lyingStream[agentv1.CreateSandboxResponse]{stream, func(m *agentv1.CreateSandboxResponse) *agentv1.CreateSandboxResponse {
		if m.GetReport() == nil {
			return m
		}
		m = proto.CloneOf(m)
		m.Report = s.lies.Answer(m.GetReport())
		return m
	}})
}

// lyingStream changes the messages that are sent.
type lyingStream[T any] struct {
	grpc.ServerStreamingServer[T]
	lie func(*T) *T
}

// Send implements grpc.ServerStreamingServer.
func (s lyingStream[T]) Send(m *T) error { return s.ServerStreamingServer.Send(s.lie(m)) }
