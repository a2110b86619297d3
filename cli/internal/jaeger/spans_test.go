package jaeger_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/jaeger"
)

// one returns the only span of a trace in Jaeger's format.
func one(t *testing.T, span map[string]any) jaeger.Span {
	t.Helper()
	body, err := json.Marshal(map[string]any{"data": []any{map[string]any{
		"spans": []any{span}, "processes": map[string]any{"p1": map[string]any{"serviceName": "agent"}},
	}}})
	require.NoError(t, err)
	spans, err := serve(t, http.StatusOK, body).Trace(t.Context(), traceID)
	require.NoError(t, err)
	require.Len(t, spans, 1)
	return spans[0]
}

// TestParents: a parent takes precedence over a span that is followed, wherever it stands.
func TestParents(t *testing.T) {
	reference := func(kind, id string) any { return map[string]any{"refType": kind, "spanID": id} }
	for name, tc := range map[string]struct {
		references []any
		want       string
	}{
		"none":                  {nil, ""},
		"parent":                {[]any{reference("CHILD_OF", "01")}, "01"},
		"followed":              {[]any{reference("FOLLOWS_FROM", "02")}, "02"},
		"followed, then parent": {[]any{reference("FOLLOWS_FROM", "02"), reference("CHILD_OF", "01")}, "01"},
		"parent, then followed": {[]any{reference("CHILD_OF", "01"), reference("FOLLOWS_FROM", "02")}, "01"},
		"two parents":           {[]any{reference("CHILD_OF", "01"), reference("CHILD_OF", "03")}, "01"},
		"a kind of its own":     {[]any{reference("LINKED_TO", "04")}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, tc.want, one(t, map[string]any{"references": tc.references}).Parent)
		})
	}
}

// TestFailures: a message alone does not make a span fail, and a failure without a message has a text.
func TestFailures(t *testing.T) {
	tag := func(key string, value any) any { return map[string]any{"key": key, "value": value} }
	for name, tc := range map[string]struct {
		tags []any
		want string
	}{
		"none":                {nil, ""},
		"a message alone":     {[]any{tag("otel.status_description", "broken")}, ""},
		"failed":              {[]any{tag("error", true)}, "no message"},
		"failed, as text":     {[]any{tag("error", "true")}, "no message"},
		"not failed":          {[]any{tag("error", false), tag("otel.status_description", "broken")}, ""},
		"with a message":      {[]any{tag("error", true), tag("otel.status_description", "broken")}, "broken"},
		"with a number":       {[]any{tag("otel.status_description", 7), tag("error", true)}, "no message"},
		"with an empty text":  {[]any{tag("error", true), tag("otel.status_description", "")}, "no message"},
		"with unknown others": {[]any{tag("rpc.system", "grpc"), tag("error", true)}, "no message"},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, one(t, map[string]any{"tags": tc.tags}).Error) })
	}
}

func TestServiceOfASpan(t *testing.T) {
	require.Equal(t, "agent", one(t, map[string]any{"processID": "p1"}).Service)
	require.Empty(t, one(t, map[string]any{"processID": "p2"}).Service, "a process that the answer lacks")
}

// roundTrip is a transport of one function.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// TestRequest: an id of a person cannot leave the path, and an error does not repeat the URL.
func TestRequest(t *testing.T) {
	var path string
	client := &http.Client{Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
		path = r.URL.EscapedPath()
		return nil, errors.New("no route")
	})}
	_, err := jaeger.New("http://jaeger:16686//", client).Trace(t.Context(), "../services?x=/y")
	require.Equal(t, "/api/traces/..%2Fservices%3Fx=%2Fy", path)
	require.True(t, errdefs.IsUnavailable(err))
	require.ErrorContains(t, err, "connecting to Jaeger at http://jaeger:16686: no route")
	require.Equal(t, 1, strings.Count(err.Error(), "http://"), err.Error())
}
