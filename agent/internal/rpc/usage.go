package rpc

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/disk"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/meter"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// usageAge is how old a reading may be that a call returns: a caller that asks again and again costs little.
	usageAge = 200 * time.Millisecond
	// defaultInterval is the interval of a watch that sets none.
	defaultInterval = 2 * time.Second
	// listChunk is the number of sandboxes in one message.
	listChunk = 500
)

// Meter reads what sandboxes use. meter.Meter implements it.
type Meter interface {
	// Read returns a reading that is not older than maxAge. NotFound: the container has ended.
	Read(ctx context.Context, c meter.Container, maxAge time.Duration) (meter.Reading, error)
}

// Disk knows what the files of containers take. disk.Watcher implements it.
type Disk interface {
	// Measured returns the last measurement of a running container; false if there is none.
	Measured(id string) (disk.Measurement, bool)
}

// UsagesConfig is what a Usages needs.
type UsagesConfig struct {
	Sandboxes sandbox.View
	Meter     Meter
	Disk      Disk
	// Info has the identity of the agent.
	Info *agentv1.AgentInfo
}

// Usages is UsageService. Make it with NewUsages.
type Usages struct {
	usagev1.UnimplementedUsageServiceServer

	service *Service
	config  UsagesConfig
}

// NewUsages returns a UsageService for the sandboxes of a Service.
func NewUsages(s *Service, cfg UsagesConfig) *Usages { return &Usages{service: s, config: cfg} }

// MeterOf returns a sandbox as a Meter knows it.
func MeterOf(s sandbox.Started) meter.Container {
	return meter.Container{ID: s.ID, OwnNetwork: s.OwnNetwork(), Started: s.StartTime().AsTime()}
}

// sandbox returns the sandbox that a call is meant for.
func (u *Usages) sandbox(ctx context.Context) (sandbox.Started, *agentv1.Fence, error) {
	t, err := rpc.TargetOf(ctx)
	if err != nil {
		return sandbox.Started{}, nil, err
	}
	fence := &agentv1.Fence{SandboxUid: t.SandboxUID, Attempt: t.Attempt, AgentUid: t.AgentUID}
	s, err := u.config.Sandboxes.Find(ctx, fence)
	return s, fence, err
}

func errEnded() error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.PhaseConflict, "the process of the sandbox has ended")
}

// read reads what a sandbox uses. errdefs.ErrFailedPrecondition: it has ended.
func (u *Usages) read(ctx context.Context, s sandbox.Started, maxAge time.Duration) (*usagev1.SandboxUsage, error) {
	select {
	case <-s.Ended:
		return nil, errEnded()
	default:
	}
	r, err := u.config.Meter.Read(ctx, MeterOf(s), maxAge)
	if errdefs.IsNotFound(err) {
		return nil, errEnded()
	}
	if err != nil {
		return nil, err
	}
	out := usageOf(r)
	out.Namespace, out.Name, out.Uid, out.Pool = s.Record.GetNamespace(), s.Record.GetName(), s.Record.GetFence().GetSandboxUid(), s.Record.GetSpec().GetPool()
	out.StartTime = s.StartTime()
	if m, ok := u.config.Disk.Measured(s.ID); ok {
		out.Disk = &usagev1.DiskUsage{Bytes: m.Bytes, Files: m.Inodes, MeasureTime: timestamppb.New(m.At)}
	}
	return out, nil
}

// GetSandboxUsage returns what a sandbox uses.
func (u *Usages) GetSandboxUsage(ctx context.Context, _ *usagev1.GetSandboxUsageRequest) (*usagev1.GetSandboxUsageResponse, error) {
	s, _, err := u.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	out, err := u.read(ctx, s, usageAge)
	if err != nil {
		return nil, err
	}
	return &usagev1.GetSandboxUsageResponse{Usage: out}, nil
}

// WatchSandboxUsage sends what a sandbox uses until it ends.
func (u *Usages) WatchSandboxUsage(req *usagev1.WatchSandboxUsageRequest, stream grpc.ServerStreamingServer[usagev1.WatchSandboxUsageResponse]) error {
	ctx := stream.Context()
	s, fence, err := u.sandbox(ctx)
	if err != nil {
		return err
	}
	interval := defaultInterval
	if d := req.GetInterval(); d != nil {
		interval = d.AsDuration()
	}
	for first := true; ; first = false {
		// The last reading was taken half of the interval ago or earlier: none is sent twice.
		out, err := u.read(ctx, s, interval/2-time.Millisecond)
		switch {
		case errdefs.IsFailedPrecondition(err) && first:
			return err
		case errdefs.IsFailedPrecondition(err):
			return u.sendEnd(stream, s, fence)
		case err != nil:
			return err
		}
		if err := stream.Send(&usagev1.WatchSandboxUsageResponse{Event: &usagev1.WatchSandboxUsageResponse_Usage{Usage: out}}); err != nil {
			return err
		}
		timer := u.service.config.Clock.NewTimer(untilNext(u.service.config.Clock.Now(), interval, s.ID))
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-u.service.closing:
			timer.Stop()
			return errStopping()
		case <-s.Ended:
			timer.Stop()
		case <-timer.C():
		}
	}
}

// untilNext returns the time until the next reading of a container. Those of all watches with one interval are at the same times, so that they share
// them, and those of different containers are not. The first one is at least half of the interval away.
func untilNext(now time.Time, interval time.Duration, id string) time.Duration {
	h := fnv.New64a()
	_, _ = h.Write([]byte(id))
	since := time.Duration(uint64(now.UnixNano())+h.Sum64()%uint64(interval)) % interval
	if next := interval - since; next >= interval/2 {
		return next
	}
	return 2*interval - since
}

// sendEnd waits until the end of a sandbox is known, and sends it.
func (u *Usages) sendEnd(stream grpc.ServerStreamingServer[usagev1.WatchSandboxUsageResponse], s sandbox.Started, fence *agentv1.Fence) error {
	select {
	case <-s.Ended:
	case <-stream.Context().Done():
		return stream.Context().Err()
	case <-u.service.closing:
		return errStopping()
	}
	end := &usagev1.WatchSandboxUsageResponse_Ended{}
	if last, err := u.config.Sandboxes.Find(stream.Context(), fence); err == nil {
		end.ExitCode, end.Reason, end.Message, end.FinishTime = last.Report.ExitCode, last.Report.GetReason(), last.Report.GetMessage(), last.Report.GetFinishTime()
	}
	return stream.Send(&usagev1.WatchSandboxUsageResponse{Event: &usagev1.WatchSandboxUsageResponse_Ended_{Ended: end}})
}

// ListSandboxUsage sends what the running sandboxes of this agent use.
func (u *Usages) ListSandboxUsage(req *usagev1.ListSandboxUsageRequest, stream grpc.ServerStreamingServer[usagev1.ListSandboxUsageResponse]) error {
	info := u.config.Info
	switch {
	case req.GetNamespace() != "" && req.GetNamespace() != info.GetNamespace():
		return fault.Field("namespace", "the agent is in namespace %q", info.GetNamespace())
	case req.GetPool() != "" && req.GetPool() != info.GetPool():
		return fault.Field("pool", "the agent is in pool %q", info.GetPool())
	}
	var all []*usagev1.SandboxUsage
	var failed []error
	for _, s := range u.config.Sandboxes.Running() {
		out, err := u.read(stream.Context(), s, usageAge)
		switch {
		case err == nil:
			all = append(all, out)
		case stream.Context().Err() != nil:
			return stream.Context().Err()
		case !errdefs.IsFailedPrecondition(err):
			failed = append(failed, fmt.Errorf("sandbox %s: %w", s.Record.GetName(), err))
		}
	}
	slices.SortFunc(all, func(a, b *usagev1.SandboxUsage) int { return strings.Compare(a.GetName(), b.GetName()) })
	from := func(m *usagev1.ListSandboxUsageResponse) *usagev1.ListSandboxUsageResponse {
		m.AgentPod, m.NodeName = info.GetPodName(), info.GetNodeName()
		return m
	}
	for chunk := range slices.Chunk(all, listChunk) {
		if err := stream.Send(from(&usagev1.ListSandboxUsageResponse{Sandboxes: chunk})); err != nil {
			return err
		}
	}
	if len(failed) > 0 {
		return stream.Send(from(&usagev1.ListSandboxUsageResponse{Error: errors.Join(failed...).Error()}))
	}
	return nil
}

// usageOf translates a reading.
func usageOf(r meter.Reading) *usagev1.SandboxUsage {
	out := &usagev1.SandboxUsage{
		ReadTime: timestamppb.New(r.At),
		Cpu: &usagev1.CPUUsage{
			Total: optional(r.CPU.Total), User: optional(r.CPU.User), System: optional(r.CPU.System), Throttled: optional(r.CPU.Throttled),
			ThrottledPeriods: r.CPU.ThrottledPeriods, LimitMillis: r.CPU.LimitMillis,
		},
		Memory: &usagev1.MemoryUsage{
			WorkingSetBytes: r.Memory.WorkingSet, UsageBytes: r.Memory.Usage, PeakBytes: r.Memory.Peak, LimitBytes: r.Memory.Limit, OomKills: r.Memory.OOMKills,
		},
		Processes: &usagev1.ProcessUsage{Current: r.PIDs.Current, Limit: r.PIDs.Limit},
	}
	if io := r.IO; io != nil {
		out.Io = &usagev1.IOUsage{ReadBytes: io.ReadBytes, WrittenBytes: io.WrittenBytes, Reads: io.Reads, Writes: io.Writes}
	}
	if n := r.Network; n != nil {
		out.Network = &usagev1.NetworkUsage{
			ReceivedBytes: n.ReceivedBytes, SentBytes: n.SentBytes, ReceivedPackets: n.ReceivedPackets, SentPackets: n.SentPackets,
			ReceivedDropped: n.ReceivedDropped, SentDropped: n.SentDropped,
		}
	}
	return out
}

// optional returns a duration; nil for nil.
func optional(d *time.Duration) *durationpb.Duration {
	if d == nil {
		return nil
	}
	return durationpb.New(*d)
}
