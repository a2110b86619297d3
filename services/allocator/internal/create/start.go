package create

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// admissionTimeout is how long an agent may take to admit a sandbox, which needs no I/O of it; then it counts as lost.
const admissionTimeout = 5 * time.Second

// start has an agent create and start the sandbox. known says, with an error, that nothing of it is left there or ever will
// be; otherwise the container must be deleted by its fence.
func (c *Creator) start(ctx context.Context, record *agentv1.SandboxRecord, timings *stages) (report *agentv1.SandboxReport, known bool, err error) {
	client, ok := c.config.Agents.Client(record.GetFence().GetAgentUid())
	if !ok {
		return nil, true, fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "there is no connection to the agent")
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	admission := c.config.Clock.AfterFunc(admissionTimeout, cancel)
	defer admission.Stop()
	began := c.config.Clock.Now()
	stream, err := client.CreateSandbox(ctx, &agentv1.CreateSandboxRequest{Record: record})
	if err != nil {
		return nil, false, rpc.FromStatus(err)
	}
	var inside time.Duration
	var own stages
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil, false, fault.New(errdefs.ErrInternal, fault.Internal, "the agent ended a create without starting the sandbox")
		}
		if err != nil {
			return nil, refusal(err), rpc.FromStatus(err)
		}
		admission.Stop()
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
	for _, d := range st.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetDomain() == rpc.Domain {
			return true
		}
	}
	return false
}
