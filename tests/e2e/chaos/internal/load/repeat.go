package load

import (
	"cmp"
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
	// requestTimeout is the deadline of one request. It is longer than a network cut, so that servers send their own answers.
	requestTimeout = 20 * time.Second
	// minBackoff and maxBackoff are those of fsb-ctl.
	minBackoff = 100 * time.Millisecond
	maxBackoff = time.Second
	// nameTimeout is how long a create is repeated until the previous sandbox of its name no longer exists.
	nameTimeout = 15 * time.Second
)

// answer is the class of the answer to one request.
type answer int

const (
	done answer = iota
	// refusal: a typed error, and a repetition would have the same result.
	refusal
	// later: a typed error that may be retried. The server did nothing, unless it says that the outcome is unknown.
	later
	// silence: the outcome is unknown.
	silence
)

// classify classifies an answer. Only a typed error of the server says what the server did; unsure is true if it does not.
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

// repeat sends a request again and again until it has an answer or the limit is over, and completes c. Refusals with a reason
// in again are repeated too, up to nameTimeout.
func (r *Runner) repeat(ctx context.Context, c *audit.Call, limit time.Duration, again map[string]bool, send func(context.Context) error) {
	c.Sent = r.Clock.Now()
	backoff := minBackoff
	for {
		c.Requests++
		began := r.Clock.Now()
		requestCtx, cancel := context.WithTimeout(ctx, requestTimeout)
		err := send(requestCtx)
		cancel()
		a, reason, wait, unsure := classify(err)
		c.Answered = r.Clock.Now()
		c.Phases = append(c.Phases, phase("request: "+cmp.Or(reason, "OK"), c.Answered.Sub(began), err))
		if err != nil {
			if c.Reason != "" && !slices.Contains(c.Earlier, c.Reason) {
				c.Earlier = append(c.Earlier, c.Reason)
			}
			c.Reason, c.Message = reason, status.Convert(err).Message()
		}
		if reason == "INTERNAL" {
			r.Log.addInternal()
		}
		c.Unsure = c.Unsure || unsure
		switch {
		case a == done:
			c.Outcome = audit.Acked
			return
		case a == refusal && (!again[reason] || c.Answered.Sub(c.Sent) > nameTimeout):
			c.Outcome = audit.Refused
			return
		}
		if c.Answered.Sub(c.Sent) > limit || ctx.Err() != nil {
			c.Outcome = audit.Refused
			if a == silence {
				c.Outcome = audit.Unknown
			}
			return
		}
		pause := max(wait, backoff)
		c.Phases = append(c.Phases, phase("wait: "+reason, pause, nil))
		r.wait(ctx, pause)
		backoff = min(2*backoff, maxBackoff)
	}
}

func phase(name string, took time.Duration, err error) audit.Phase {
	p := audit.Phase{Name: name, Millis: float64(took.Microseconds()) / 1000}
	if err != nil {
		p.Message = status.Convert(err).Message()
	}
	return p
}

// wait returns when the time is over or ctx ends.
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
