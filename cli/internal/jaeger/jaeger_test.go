package jaeger_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/jaeger"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const traceID = "4bf92f3577b34da6a3ce929d0e0e4736"

// serve returns a client of a Jaeger that answers every request with the code and the body.
func serve(t *testing.T, code int, body []byte) *jaeger.Client {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/traces/"+traceID || r.Method != http.MethodGet {
			code = http.StatusTeapot
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_, _ = w.Write(body)
	}))
	t.Cleanup(s.Close)
	client := s.Client()
	t.Cleanup(client.CloseIdleConnections)
	return jaeger.New(s.URL+"/", client)
}

func TestTrace(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join("testdata", "trace.json"))
	require.NoError(t, err)
	spans, err := serve(t, http.StatusOK, raw).Trace(t.Context(), traceID)
	require.NoError(t, err)
	begin := time.UnixMicro(1893553445000000)
	require.Equal(t, []jaeger.Span{
		{ID: "01", Service: "fsb-ctl", Name: "fsb-ctl run", Start: begin, Duration: 12300 * time.Microsecond},
		{ID: "02", Parent: "01", Service: "allocator", Name: "SandboxService/CreateSandbox", Start: begin.Add(1200 * time.Microsecond), Duration: 9 * time.Millisecond},
		{ID: "03", Parent: "02", Service: "agent", Name: "claim", Start: begin.Add(4 * time.Millisecond), Duration: 1500 * time.Microsecond, Error: "no slot is free"},
		{ID: "04", Parent: "02", Service: "controller", Name: "reconcile", Start: begin.Add(20 * time.Millisecond), Duration: time.Millisecond, Error: "no message"},
	}, spans)
}

func TestErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		code   int
		body   string
		is     func(error) bool
		reason fault.Reason
	}{
		"not found":       {404, `{"data":null,"errors":[{"code":404,"msg":"trace not found"}]}`, errdefs.IsNotFound, jaeger.ReasonNotFound},
		"no data":         {200, `{"data":[]}`, errdefs.IsNotFound, jaeger.ReasonNotFound},
		"another error":   {500, `{"data":null,"errors":[{"code":500,"msg":"storage"}]}`, errdefs.IsUnavailable, jaeger.ReasonUnavailable},
		"another service": {200, `<html>`, errdefs.IsUnavailable, jaeger.ReasonUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := serve(t, tc.code, []byte(tc.body)).Trace(t.Context(), traceID)
			require.True(t, tc.is(err), "%v", err)
			require.Equal(t, tc.reason, fault.ReasonOf(err))
		})
	}
	client := &http.Client{}
	_, err := jaeger.New("http://127.0.0.1:1", client).Trace(t.Context(), traceID)
	require.True(t, errdefs.IsUnavailable(err), "%v", err)
	require.ErrorContains(t, err, "connecting to Jaeger at http://127.0.0.1:1: dial tcp")
	_, err = jaeger.New("://", client).Trace(t.Context(), traceID)
	require.True(t, errdefs.IsInvalidArgument(err), "%v", err)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = jaeger.New("http://127.0.0.1:1", client).Trace(ended, traceID)
	require.ErrorIs(t, err, context.Canceled)
}
