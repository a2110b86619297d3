package rest

import (
	"context"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// maxAttempts is how often a call that reaches no leader is made.
const maxAttempts = 5

// retries are the delays between these calls: about a second altogether.
func retries() backoff.Policy {
	return backoff.Policy{Initial: 100 * time.Millisecond, Max: 500 * time.Millisecond}
}

// retrying is a connection that repeats a call while the server's leader changes. Every call must be safe to repeat:
// mutations carry a request_id.
type retrying struct {
	grpc.ClientConnInterface
	clock clock.Clock
}

// Invoke implements grpc.ClientConnInterface.
func (c retrying) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	return again(ctx, c.clock, func() error { return c.ClientConnInterface.Invoke(ctx, method, args, reply, opts...) })
}

// again repeats a call that did not reach a leader. It returns the last error of the call itself.
func again(ctx context.Context, c clock.Clock, call func() error) error {
	var last error
	attempts := 0
	err := backoff.Retry(ctx, c, retries(), func(context.Context) error {
		attempts++
		if last = call(); last != nil && (!leaderless(last) || attempts == maxAttempts) {
			return backoff.Permanent(last)
		}
		return last
	})
	if err != nil {
		return last
	}
	return nil
}

// leaderless reports whether a call failed because it reached no server, or one that does not lead.
func leaderless(err error) bool {
	st := status.Convert(err)
	if st.Code() != codes.Unavailable {
		return false
	}
	for _, d := range st.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info.GetReason() == string(fault.NotLeader)
		}
	}
	return true
}
