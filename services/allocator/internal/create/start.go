package create

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Bounds of one attempt. How long an agent may take depends on the image, so that what is bounded is its silence: otherwise a
// create hangs at an agent that is stopped or cut off until its connection is found to be dead, some 15 s later.
const (
	// DefaultAdmissionTimeout is how long an agent may take to admit a sandbox, which needs no I/O of it.
	DefaultAdmissionTimeout = 3 * time.Second
	// DefaultSilenceTimeout is how long an agent that creates a sandbox may send no status; it sends one each half second.
	DefaultSilenceTimeout = 4 * time.Second
	// silencePeriods is how often in a silence timeout an attempt looks for it.
	silencePeriods = 4
)

// start has an agent create and start the sandbox. known says, with an error, that nothing of it is left there or ever will
// be; otherwise the container must be deleted by its fence.
func (c *Creator) start(ctx context.Context, record *agentv1.SandboxRecord, timings *stages) (report *agentv1.SandboxReport, known bool, err error) {
	client, ok := c.config.Agents.Client(record.GetFence().GetAgentUid())
	if !ok {
		return nil, true, fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "there is no connection to the agent")
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var admitted atomic.Bool
	admission := c.config.Clock.AfterFunc(c.config.AdmissionTimeout, func() {
		if admitted.Load() {
			c.watch(ctx, record.GetFence().GetAgentUid(), cancel)
		} else {
			cancel(errUnresponsive)
		}
	})
	defer admission.Stop()
	began := c.config.Clock.Now()
	stream, err := client.CreateSandbox(ctx, &agentv1.CreateSandboxRequest{Record: record})
	if err != nil {
		return nil, false, attemptError(ctx, err)
	}
	var inside time.Duration
	var own stages
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil, false, fault.New(errdefs.ErrInternal, fault.Internal, "the agent ended a create without starting the sandbox")
		}
		if err != nil {
			return nil, refusal(err), attemptError(ctx, err)
		}
		admitted.Store(true)
		inside += answer.GetDuration().AsDuration()
		if name := stageName(answer.GetStage()); name != "" {
			own.add(name, answer.GetDuration().AsDuration())
		}
		if answer.GetStage() == agentv1.CreateStage_CREATE_STAGE_STARTED {
			timings.add("agent", c.config.Clock.Since(began)-inside)
			*timings = append(*timings, own...)
			return answer.GetReport(), false, nil
		}
	}
}

// retryAgent is when a caller may repeat a create that failed by its agent. Another agent may take it at once.
const retryAgent = 250 * time.Millisecond

// errUnresponsive is why an attempt ends whose agent does not answer.
var errUnresponsive = errors.New("the agent does not answer")

// attemptError returns the error of an attempt, given that of its stream. One that this process ended, after a timeout or by
// closing the connection to an agent whose Pod is gone, is the agent's failure, not the caller's cancellation.
func attemptError(ctx context.Context, err error) error {
	switch {
	case errors.Is(context.Cause(ctx), errUnresponsive):
		return fault.Wrap(err, errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent does not answer").RetryIn(retryAgent)
	case ctx.Err() == nil && status.Code(err) == grpccodes.Canceled && !ours(status.Convert(err)):
		return fault.Wrap(err, errdefs.ErrUnavailable, fault.AgentUnavailable, "the connection to the agent was closed").RetryIn(retryAgent)
	}
	return rpc.FromStatus(err)
}

// watch ends an attempt when its agent falls silent.
func (c *Creator) watch(ctx context.Context, agentUID string, end context.CancelCauseFunc) {
	if ctx.Err() != nil {
		return
	}
	agent, ok := c.config.Fleet.Agent(agentUID)
	if !ok || c.config.Clock.Since(agent.GetLastHeartbeatTime().AsTime()) > c.config.SilenceTimeout {
		end(errUnresponsive)
		return
	}
	c.config.Clock.AfterFunc(c.config.SilenceTimeout/silencePeriods, func() { c.watch(ctx, agentUID, end) })
}

// refusal reports whether an error is the agent's own answer, which says that nothing is left, as against the connection's.
func refusal(err error) bool {
	st, ok := status.FromError(err)
	if !ok {
		return false
	}
	switch st.Code() {
	case grpccodes.Canceled, grpccodes.DeadlineExceeded, grpccodes.Internal, grpccodes.Unknown:
		return false
	}
	if fault.ReasonOf(rpc.FromStatus(err)) == fault.LeaderSuperseded {
		return false // the later leader may have other plans
	}
	return ours(st)
}

// ours reports whether a status comes from one of our servers, as against the transport.
func ours(st *status.Status) bool {
	for _, d := range st.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetDomain() == rpc.Domain {
			return true
		}
	}
	return false
}
