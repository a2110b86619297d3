package load

import (
	"context"
	"slices"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
)

const (
	// tryTimeout is the deadline of one try. It is longer than a network cut, so that servers give their own answers.
	tryTimeout = 20 * time.Second
	retryFirst = 100 * time.Millisecond
	retryMost  = 2 * time.Second
	// againPatience is how long a create waits for the former sandbox of its name to be gone.
	againPatience = 15 * time.Second
)

// answer is what one try was told.
type answer int

const (
	done answer = iota
	// refusal: typed, and repeating it would change nothing.
	refusal
	// later: typed; the server says when to come again, and did nothing unless it says that it does not know.
	later
	// silence: nobody knows what has happened.
	silence
)

// classify reads an answer. Only an error that the server itself has typed says anything about what it did; unsure tells
// that it does not.
func classify(err error) (a answer, reason string, wait time.Duration, unsure bool) {
	if err == nil {
		return done, "", 0, false
	}
	st := status.Convert(err)
	for _, d := range st.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			if d.GetDomain() == rpc.Domain {
				reason, unsure = d.GetReason(), d.GetMetadata()[fault.OutcomeKey] == fault.OutcomeUnknown
			}
		case *errdetails.RetryInfo:
			wait = d.GetRetryDelay().AsDuration()
		}
	}
	switch {
	case reason == "":
		return silence, st.Code().String(), 0, true
	case st.Code() == codes.Internal:
		return silence, reason, 0, true
	case st.Code() == codes.Unavailable, st.Code() == codes.ResourceExhausted, st.Code() == codes.DeadlineExceeded, st.Code() == codes.Canceled:
		return later, reason, wait, unsure
	default:
		return refusal, reason, 0, unsure
	}
}

// repeat carries a call out again and again until it is answered or the patience is over, and completes c. Tries that
// end with a reason in again are repeated, too, for a while.
func (r *Runner) repeat(ctx context.Context, c *audit.Call, patience time.Duration, again map[string]bool, try func(context.Context) error) {
	c.Sent = r.Clock.Now()
	backoff := retryFirst
	for {
		c.Tries++
		tryCtx, cancel := context.WithTimeout(ctx, tryTimeout)
		err := try(tryCtx)
		cancel()
		a, reason, wait, unsure := classify(err)
		c.Answered = r.Clock.Now()
		if err != nil {
			if c.Reason != "" && !slices.Contains(c.Earlier, c.Reason) {
				c.Earlier = append(c.Earlier, c.Reason)
			}
			c.Reason, c.Message = reason, status.Convert(err).Message()
		}
		if reason == "INTERNAL" {
			r.Log.defect()
		}
		c.Unsure = c.Unsure || unsure
		switch {
		case a == done:
			c.Outcome = audit.Acked
			return
		case a == refusal && (!again[reason] || c.Answered.Sub(c.Sent) > againPatience):
			c.Outcome = audit.Refused
			return
		}
		if c.Answered.Sub(c.Sent) > patience || ctx.Err() != nil {
			c.Outcome = audit.Refused
			if a == silence {
				c.Outcome = audit.Unknown
			}
			return
		}
		r.wait(ctx, max(wait, backoff))
		backoff = min(2*backoff, retryMost)
	}
}

// wait returns when the time is over or ctx is.
func (r *Runner) wait(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	timer := r.Clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C():
	case <-ctx.Done():
	}
}
