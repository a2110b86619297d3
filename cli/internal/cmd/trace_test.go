package cmd_test

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

const (
	createTrace = "4bf92f3577b34da6a3ce929d0e0e4736"
	deleteTrace = "5bf92f3577b34da6a3ce929d0e0e4736"
)

// serveTraces serves the recorded trace of package jaeger for every id, and none for the trace of zeros.
func serveTraces(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("..", "jaeger", "testdata", "trace.json"))
	require.NoError(t, err)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/api/traces/00" {
			w.WriteHeader(http.StatusNotFound)
			_, _ = w.Write([]byte(`{"data":null,"errors":[{"code":404,"msg":"trace not found"}]}`))
			return
		}
		_, _ = w.Write(raw)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

const traceTable = `START     DURATION   SERVICE      SPAN
0.00 ms   12.3 ms    fsb-ctl      fsb-ctl run
1.2 ms    9.0 ms     allocator    └─ SandboxService/CreateSandbox
4.0 ms    1.5 ms     agent           ├─ claim (failed: no slot is free)
20.0 ms   1.0 ms     controller      └─ reconcile (failed: no message)
`

func TestTrace(t *testing.T) {
	b, _ := withResources(t,
		resource("web", map[string]string{v1alpha1.AnnotationTraceparent: "00-" + createTrace + "-00f067aa0ba902b7-01"}),
		resource("gone", map[string]string{
			v1alpha1.AnnotationTraceparent:       "00-" + createTrace + "-00f067aa0ba902b7-01",
			v1alpha1.AnnotationDeleteTraceparent: "00-" + deleteTrace + "-00f067aa0ba902b7-01",
		}),
		resource("silent", map[string]string{v1alpha1.AnnotationTraceparent: "nonsense"}))
	b.env["FSB_JAEGER_ADDRESS"] = serveTraces(t)

	r := b.run(t, "trace", "web")
	require.Zero(t, r.code, r.err)
	require.Equal(t, traceTable, r.out)
	r = b.run(t, "trace", "gone")
	require.Equal(t, "create (trace "+createTrace+")\n"+traceTable+"delete (trace "+deleteTrace+")\n"+traceTable, r.out)
	require.Equal(t, traceTable, b.run(t, "trace", "--trace-id", createTrace).out)
	require.Equal(t, "trace/"+createTrace+"\ntrace/"+deleteTrace+"\n", b.run(t, "trace", "gone", "-o", "name").out)
	r = b.run(t, "trace", "web", "-o", "json")
	require.Contains(t, r.out, `"traceID": "`+createTrace+`"`)
	require.Contains(t, r.out, `"duration": "1.5ms",
          "error": "no slot is free"`)
	require.Contains(t, b.run(t, "trace", "web", "-o", "yaml").out, "service: controller\n")

	r = b.run(t, "trace", "silent")
	require.Equal(t, 3, r.code)
	require.Contains(t, r.err, "(NO_TRACE)\nhint: ")
	r = b.run(t, "trace", "--trace-id", "00")
	require.Equal(t, 3, r.code)
	require.Contains(t, r.err, "does not have trace 00 (TRACE_NOT_FOUND)\nhint: ")
	require.Equal(t, 3, b.run(t, "trace", "none").code)
	r = b.run(t, "trace", "web", "--jaeger-address", "http://127.0.0.1:1", "--timeout", "1ms")
	require.NotZero(t, r.code)
}
