// Package audit writes the audit log: one record for each call of a user, with who asked for what and what was decided, when it was
// decided. A record holds named fields alone, never a request, so that no value that a user passes to a sandbox can get into it. The
// server that authorizes a call writes its record, and the gateway those of calls that it does not pass on. What becomes of an allowed
// call is in the access log, under the same trace id.
//
// All methods may be called concurrently. They write to the log, and do not block otherwise.
package audit

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/time/rate"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// Decision is what was decided about a call.
type Decision string

// The decisions.
const (
	// Allow: the user may make the call.
	Allow Decision = "allow"
	// Deny: the user may not make it, or has not proved who it is.
	Deny Decision = "deny"
	// Error: it was refused without a decision, because it is invalid or the API server does not answer.
	Error Decision = "error"
)

// Name is the name of the logger, which no other records have.
const Name = "audit"

// Record is one call.
type Record struct {
	// Caller is who called; one whose User is empty has not proved who it is.
	Caller auth.Caller
	// Method is the full method (/package.Service/Method), or the method and path of an HTTP request.
	Method string
	// Access is what the call needs; empty for calls that every user may make, and unknown ones.
	Access auth.Access
	// Name of the object, and RequestID, as the request has them.
	Name, RequestID string
	// Command is the first argument of the process that the call starts, and Arguments the number of all; empty if it starts none.
	Command   string
	Arguments int
	// Decision, and the Reason for it.
	Decision Decision
	Reason   string
}

// Of returns the decision and the reason that an error says; a nil error is Allow, for the given reason.
func Of(err error, reason string) (Decision, string) {
	var f *fault.Error
	switch {
	case err == nil:
		return Allow, reason
	case errors.As(err, &f):
		reason = string(f.Reason())
	default:
		reason = string(fault.Internal)
	}
	if errdefs.IsPermissionDenied(err) || errdefs.IsUnauthorized(err) || errdefs.IsResourceExhausted(err) {
		return Deny, reason
	}
	return Error, reason
}

// Bounds of records that strangers, and users beyond their limits, can cause at will.
const (
	refusalsPerSecond = 10
	refusalsBurst     = 100
)

// Bounds of a record.
const (
	maxText   = 253 // the longest name of an object
	maxGroups = 64
)

// noVerb is the verb, in metrics, of calls that need no right or that no rule knows.
const noVerb = "none"

// Log is an audit log.
type Log struct {
	log       logr.Logger
	clock     clock.PassiveClock
	decisions *prometheus.CounterVec
	omissions prometheus.Counter
	refusals  *rate.Limiter
	omitted   atomic.Int64
}

// New returns an audit log that writes to log and counts in r, which may be nil.
func New(log logr.Logger, r prometheus.Registerer, c clock.PassiveClock) (*Log, error) {
	l := &Log{
		log: log.WithName(Name), clock: c, refusals: rate.NewLimiter(refusalsPerSecond, refusalsBurst),
		decisions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_audit_decisions_total", Help: "Calls of users by verb and decision (allow, deny, error).",
		}, []string{"verb", "decision"}),
		omissions: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fastsandbox_audit_omitted_total", Help: "Refused calls of which the audit log has no record because there were too many.",
		}),
	}
	if r == nil {
		return l, nil
	}
	var err error
	if l.decisions, err = registered(r, l.decisions); err == nil {
		l.omissions, err = registered(r, l.omissions)
	}
	if err != nil {
		return nil, fmt.Errorf("registering metrics of the audit log: %w", err)
	}
	return l, nil
}

// registered registers a collector, or returns that of another log of the process.
func registered[C prometheus.Collector](r prometheus.Registerer, c C) (C, error) {
	err := r.Register(c)
	if known, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if same, ok := known.ExistingCollector.(C); ok {
			return same, nil
		}
	}
	return c, err
}

// Write writes a record. ctx carries the span of the call.
func (l *Log) Write(ctx context.Context, r Record) {
	l.count(r)
	l.write(ctx, r)
}

// WriteBounded is Write for calls that cost their caller nothing: beyond 10 a second (100 at once) they are only counted. The next
// record says how many were omitted.
func (l *Log) WriteBounded(ctx context.Context, r Record) {
	l.count(r)
	if !l.refusals.AllowN(l.clock.Now(), 1) {
		l.omitted.Add(1)
		l.omissions.Inc()
		return
	}
	l.write(ctx, r)
}

func (l *Log) count(r Record) {
	verb := r.Access.Verb
	if verb == "" {
		verb = noVerb
	}
	l.decisions.WithLabelValues(verb, string(r.Decision)).Inc()
}

func (l *Log) write(ctx context.Context, r Record) {
	c := r.Caller
	values := []any{
		obs.KeyUser, short(c.User), obs.KeyGroups, groups(c.Groups), obs.KeyAuthentication, string(c.Method), obs.KeyAddress, c.Address,
		obs.KeyMethod, short(r.Method), obs.KeyVerb, r.Access.Verb, obs.KeyResource, resource(r.Access), obs.KeyNamespace, short(r.Access.Namespace),
		obs.KeyName, short(r.Name), obs.KeyDecision, string(r.Decision), obs.KeyReason, short(r.Reason), obs.KeyRequestID, short(r.RequestID),
	}
	if r.Arguments > 0 {
		values = append(values, obs.KeyCommand, short(r.Command), obs.KeyArguments, r.Arguments)
	}
	if span := trace.SpanContextFromContext(ctx); span.HasTraceID() {
		values = append(values, obs.KeyTraceID, span.TraceID().String())
	}
	if n := l.omitted.Swap(0); n > 0 {
		values = append(values, obs.KeyOmitted, n)
	}
	l.log.Info("call of a user", values...)
}

// resource returns the resource as RBAC writes it, with its group: sandboxes.fast-sandbox.io/log.
func resource(a auth.Access) string {
	text := a.Resource
	if a.Group != "" {
		text += "." + a.Group
	}
	if a.Subresource != "" {
		text += "/" + a.Subresource
	}
	return text
}

// short bounds a text that a caller chooses.
func short(text string) string {
	if len(text) <= maxText {
		return text
	}
	return text[:maxText] + "..."
}

func groups(all []string) []string {
	out := make([]string, min(len(all), maxGroups))
	for i := range out {
		out[i] = short(all[i])
	}
	return out
}
