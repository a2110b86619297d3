package audit_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/internal/audit"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// records parses what was logged.
func records(t *testing.T, text string) (all []map[string]any) {
	t.Helper()
	for line := range strings.Lines(text) {
		var record map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &record), line)
		all = append(all, record)
	}
	return all
}

func newLog(t *testing.T, out io.Writer, r prometheus.Registerer, c clock.PassiveClock) *audit.Log {
	t.Helper()
	l, err := audit.New(logr.FromSlogHandler(slog.NewJSONHandler(out, nil)), r, c)
	require.NoError(t, err)
	return l
}

func TestRecord(t *testing.T) {
	var out strings.Builder
	l := newLog(t, &out, nil, clock.RealClock{})
	trace1 := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}})
	l.Write(trace.ContextWithSpanContext(t.Context(), trace1), audit.Record{
		Caller: auth.Caller{User: "alice", UID: "u", Groups: []string{"devs"}, Extra: map[string][]string{"secret": {"extra"}}, Method: auth.Token, Address: "192.0.2.1:5"},
		Method: "/a.B/C", Access: auth.Access{Verb: "get", Group: "fast-sandbox.io", Resource: "sandboxes", Subresource: "log", Namespace: "ns"},
		Name: "n", RequestID: "r", Command: "/bin/sh", Arguments: 3, Decision: audit.Allow, Reason: "RBAC: allowed",
	})
	got := records(t, out.String())
	require.Len(t, got, 1)
	require.NotEmpty(t, got[0]["time"])
	delete(got[0], "time")
	require.Equal(t, map[string]any{
		"level": "INFO", "msg": "call of a user", "logger": "audit",
		obs.KeyUser: "alice", obs.KeyGroups: []any{"devs"}, obs.KeyAuthentication: "token", obs.KeyAddress: "192.0.2.1:5", obs.KeyMethod: "/a.B/C",
		obs.KeyVerb: "get", obs.KeyResource: "sandboxes.fast-sandbox.io/log", obs.KeyNamespace: "ns", obs.KeyName: "n",
		obs.KeyDecision: "allow", obs.KeyReason: "RBAC: allowed", obs.KeyRequestID: "r", obs.KeyCommand: "/bin/sh", obs.KeyArguments: 3.0, obs.KeyTraceID: "01000000000000000000000000000000",
	}, got[0])
}

// TestRecordsAreBounded: whatever a caller sends, a record stays one line of some kilobytes.
func TestRecordsAreBounded(t *testing.T) {
	var out strings.Builder
	l := newLog(t, &out, nil, clock.RealClock{})
	long := strings.Repeat("x\n\"}\x00\u2028", 1<<16)
	r := audit.Record{Caller: auth.Caller{User: long}, Method: long, Name: long, RequestID: long, Command: long, Arguments: 1, Reason: long, Decision: audit.Deny}
	r.Access.Namespace = long
	for range 1000 {
		r.Caller.Groups = append(r.Caller.Groups, long)
	}
	l.Write(t.Context(), r)
	require.Less(t, out.Len(), 128<<10)
	require.Len(t, records(t, out.String()), 1)
}

func TestDecisions(t *testing.T) {
	tests := map[string]struct {
		err      error
		decision audit.Decision
		reason   string
	}{
		"allowed":         {nil, audit.Allow, "because"},
		"denied":          {auth.Denied(auth.Caller{}, auth.Access{}), audit.Deny, "PERMISSION_DENIED"},
		"unauthenticated": {fault.New(errdefs.ErrUnauthenticated, fault.Unauthenticated, "who?"), audit.Deny, "UNAUTHENTICATED"},
		"over a limit":    {fault.New(errdefs.ErrResourceExhausted, fault.CallerLimitExceeded, "wait"), audit.Deny, "CALLER_LIMIT_EXCEEDED"},
		"undecided":       {fault.New(errdefs.ErrUnavailable, fault.APIUnavailable, "away"), audit.Error, "API_UNAVAILABLE"},
		"invalid":         {fmt.Errorf("checking: %w", fault.Field("name", "wrong")), audit.Error, "INVALID_FIELD"},
		"a defect":        {errors.New("secret detail"), audit.Error, "INTERNAL"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			decision, reason := audit.Of(test.err, "because")
			require.Equal(t, test.decision, decision)
			require.Equal(t, test.reason, reason)
		})
	}
}

// counters returns the values of a registry's counters, by name and the values of their labels (in the order of the labels' names).
func counters(t *testing.T, r *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := r.Gather()
	require.NoError(t, err)
	all := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			if m.GetCounter() != nil {
				all[name] = m.GetCounter().GetValue()
			}
		}
	}
	return all
}

// TestFloodsAreBounded: attempts that cost their caller nothing are counted, and only some are logged.
func TestFloodsAreBounded(t *testing.T) {
	var out strings.Builder
	r, c := prometheus.NewRegistry(), clocktesting.NewFakePassiveClock(time.Unix(1_700_000_000, 0))
	l := newLog(t, &out, r, c)
	refusal := audit.Record{Decision: audit.Deny, Access: auth.Access{Verb: "create"}}
	for range 5000 {
		l.WriteBounded(t.Context(), refusal)
	}
	require.Len(t, records(t, out.String()), 100)
	out.Reset()
	l.Write(t.Context(), audit.Record{Decision: audit.Allow})
	c.SetTime(c.Now().Add(time.Second))
	for range 5000 {
		l.WriteBounded(t.Context(), refusal)
	}
	got := records(t, out.String())
	require.Len(t, got, 11, "records of allowed calls are always written")
	require.EqualValues(t, 4900, got[0][obs.KeyOmitted])
	require.NotContains(t, got[1], obs.KeyOmitted)
	require.Equal(t, map[string]float64{
		"fastsandbox_audit_decisions_total allow none": 1, "fastsandbox_audit_decisions_total deny create": 10000, "fastsandbox_audit_omitted_total": 9890,
	}, counters(t, r))
}

// TestRegistration: the logs of one process count together.
func TestRegistration(t *testing.T) {
	r := prometheus.NewRegistry()
	for range 2 {
		l, err := audit.New(logr.Discard(), r, clock.RealClock{})
		require.NoError(t, err)
		l.Write(t.Context(), audit.Record{Decision: audit.Allow})
	}
	require.InDelta(t, 2, counters(t, r)["fastsandbox_audit_decisions_total allow none"], 0)
	other := prometheus.NewRegistry()
	other.MustRegister(prometheus.NewCounter(prometheus.CounterOpts{Name: "fastsandbox_audit_decisions_total"}))
	_, err := audit.New(logr.Discard(), other, clock.RealClock{})
	require.ErrorContains(t, err, "registering")
}

// BenchmarkWrite is the cost of the audit log for one call, without that of the device.
func BenchmarkWrite(b *testing.B) {
	l, err := audit.New(logr.FromSlogHandler(slog.NewJSONHandler(io.Discard, nil)), nil, clock.RealClock{})
	require.NoError(b, err)
	r := audit.Record{
		Caller: auth.Caller{User: "system:serviceaccount:team:bot", Groups: []string{"system:authenticated", "system:serviceaccounts", "system:serviceaccounts:team"}, Method: auth.Token, Address: "192.0.2.1:34567"},
		Method: "/fastsandbox.sandbox.v1.SandboxService/CreateSandbox", Access: auth.Access{Verb: "create", Group: "fast-sandbox.io", Resource: "sandboxes", Namespace: "team"},
		Name: "sandbox", RequestID: "0123456789", Decision: audit.Allow, Reason: `RBAC: allowed by RoleBinding "bot/team" of ClusterRole "fast-sandbox-edit"`,
	}
	b.ReportAllocs()
	for b.Loop() {
		l.Write(context.Background(), r)
	}
}
