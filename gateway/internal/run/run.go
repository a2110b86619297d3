// Package run creates sandboxes for one process each: RunService, which composes the create of an allocator with the process API of the agent that
// has the sandbox. It keeps no state: a gateway that ends in the middle leaves a sandbox that expires.
package run

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/utils/clock"

	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	runv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/run/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// defaultTag is the tag of a process without one.
	defaultTag = "run"
	// defaultTime is after what time a sandbox expires whose process has no timeout, and margin how long it may outlive the timeout.
	defaultTime = time.Hour
	margin      = time.Minute
	// recordTime is how long the record of a sandbox is kept that has ended and was not deleted.
	recordTime = time.Minute
	// deleteTimeout is how long a deletion may take.
	deleteTimeout = 5 * time.Second
)

// Config is what a Service needs. The connections behind the clients carry the identity of the caller in the context.
type Config struct {
	Sandboxes sandboxv1.SandboxServiceClient
	Processes processv1.ProcessServiceClient
	Clock     clock.PassiveClock
	// Draining is closed when the process stops. What can be repeated, with the same request_id, is left to the call that repeats it.
	Draining <-chan struct{}
}

// Service implements RunService. Make it with New.
type Service struct {
	runv1.UnimplementedRunServiceServer

	config Config
}

// New returns a Service.
func New(cfg Config) *Service { return &Service{config: cfg} }

// sandbox is a sandbox that a call has created.
type sandbox struct {
	service *Service
	created *sandboxv1.CreateSandboxResponse
	keep    bool
	// repeatable: a call with the same request_id finds the sandbox.
	repeatable bool
}

// create creates the sandbox of a call.
func (s *Service) create(ctx context.Context, namespace, requestID string, in *runv1.NewSandbox, process *processv1.ProcessSpec) (*sandbox, error) {
	spec := proto.CloneOf(in.GetSpec())
	spec.KeepAlive = spec.GetKeepAlive() || len(spec.GetCommand())+len(spec.GetArgs()) == 0
	if !in.GetKeep() {
		limitLife(spec, process.GetTimeout(), s.config.Clock.Now())
	}
	req := &sandboxv1.CreateSandboxRequest{Namespace: namespace, Name: in.GetName(), Spec: spec, Labels: in.GetLabels(), RequestId: requestID}
	if req.GetName() == "" && requestID != "" {
		req.Name = nameOf(namespace, requestID) // by which a repeated call finds it
	}
	created, err := s.config.Sandboxes.CreateSandbox(ctx, req)
	if fault.ReasonOf(rpc.FromStatus(err)) == fault.RequestIDReused && in.GetSpec().GetExpireTime() == nil && !in.GetKeep() {
		created, err = s.repeat(ctx, req, err)
	}
	if err != nil {
		return nil, err
	}
	return &sandbox{service: s, created: created, keep: in.GetKeep(), repeatable: requestID != ""}, nil
}

// repeat sends the create of a repeated call as the first call sent it: with the time when the sandbox of that expires. Without that sandbox, or if
// anything else differs, the request_id is refused.
func (s *Service) repeat(ctx context.Context, req *sandboxv1.CreateSandboxRequest, refused error) (*sandboxv1.CreateSandboxResponse, error) {
	first, err := s.config.Sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: req.GetNamespace(), Name: req.GetName()})
	if fault.ReasonOf(rpc.FromStatus(err)) == fault.SandboxNotFound {
		return nil, refused
	}
	if err != nil {
		return nil, err
	}
	req.Spec.ExpireTime = first.GetSandbox().GetSpec().GetExpireTime()
	return s.config.Sandboxes.CreateSandbox(ctx, req)
}

// nameOf returns the name of the sandbox of a request.
func nameOf(namespace, requestID string) string {
	sum := sha256.Sum256([]byte(namespace + "/" + requestID))
	return "run-" + hex.EncodeToString(sum[:10])
}

// limitLife has a sandbox end by itself, unless its spec says when.
func limitLife(spec *sandboxv1.SandboxSpec, timeout *durationpb.Duration, now time.Time) {
	life := defaultTime
	if timeout != nil {
		life = timeout.AsDuration() + margin
	}
	if spec.GetExpireTime() == nil {
		spec.ExpireTime = timestamppb.New(now.Add(life).Truncate(time.Second))
	}
	if spec.GetTtlAfterFinished() == nil {
		spec.TtlAfterFinished = durationpb.New(recordTime)
	}
}

// draining reports whether the process stops.
func (s *Service) draining() bool {
	select {
	case <-s.config.Draining:
		return true
	default:
		return false
	}
}

// untilDraining returns a context that ends with ctx, or with errDraining when the process stops. release ends it, too.
func (s *Service) untilDraining(ctx context.Context) (_ context.Context, release func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case <-s.config.Draining:
			cancel(errDraining())
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil); <-ended }
}

func errDraining() error {
	return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the gateway is stopping; repeat the call with the same request_id")
}

func (s *sandbox) namespace() string { return s.created.GetSandbox().GetNamespace() }
func (s *sandbox) name() string      { return s.created.GetSandbox().GetName() }

// close ends the use of the sandbox, also when the call has ended already. It reports whether the sandbox is deleted. A sandbox that is to be kept
// is deleted if its process did not start, unless an earlier call has created it. One whose call ended because this process stops stays for the call
// that repeats it, and expires otherwise.
func (s *sandbox) close(ctx context.Context, started bool) bool {
	if s.keep && (started || s.created.GetReplayed()) || s.repeatable && ctx.Err() != nil && s.service.draining() {
		return false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteTimeout)
	defer cancel()
	sb := s.created.GetSandbox()
	in := &sandboxv1.DeleteSandboxRequest{Namespace: sb.GetNamespace(), Name: sb.GetName(), Uid: sb.GetUid()}
	if sb.GetSpec().GetKeepAlive() {
		in.GracePeriod = durationpb.New(0) // what is left of the process is not waited for
	}
	_, err := s.service.config.Sandboxes.DeleteSandbox(ctx, in)
	if err != nil {
		logr.FromContextOrDiscard(ctx).Error(err, "deleting a sandbox whose process has ended; it expires", obs.KeySandbox, sb.GetNamespace()+"/"+sb.GetName())
	}
	return err == nil
}

// byTag names a process.
func byTag(tag string) *processv1.ProcessSelector {
	return &processv1.ProcessSelector{By: &processv1.ProcessSelector_Tag{Tag: tag}}
}

// tagged returns a process with a tag, which tells a repeated call whether it runs.
func tagged(p *processv1.ProcessSpec) *processv1.ProcessSpec {
	if p.GetTag() != "" {
		return p
	}
	p = proto.CloneOf(p)
	p.Tag = defaultTag
	return p
}
