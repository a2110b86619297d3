package obs_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

const (
	traceID = "0af7651916cd43dd8448eb211c80319c"
	spanID  = "b7ad6b7169203331"
	parent  = "00-" + traceID + "-" + spanID + "-01"
)

func setup(t *testing.T, o obs.Options) context.Context {
	t.Helper()
	if o.Output == nil {
		o.Output = io.Discard
	}
	ctx, flush, err := obs.Setup(t.Context(), o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, flush(context.WithoutCancel(ctx))) })
	return ctx
}

func TestPropagators(t *testing.T) {
	tests := map[string]struct {
		variable string
		header   string // one that the propagators write for parent
		value    string
	}{
		"default is W3C":      {"", "traceparent", parent},
		"b3":                  {"b3", "b3", traceID + "-" + spanID + "-1"},
		"several, spaced":     {"b3multi, tracecontext", "x-b3-traceid", traceID},
		"jaeger":              {"jaeger", "uber-trace-id", traceID + ":" + spanID + ":0:1"},
		"none writes nothing": {"none", "traceparent", ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Setenv("OTEL_PROPAGATORS", tt.variable)
			ctx := obs.WithTraceparent(setup(t, obs.Options{Service: "test"}), parent)
			carrier := propagation.MapCarrier{}
			otel.GetTextMapPropagator().Inject(ctx, carrier)
			require.Equal(t, tt.value, carrier[tt.header])

			received := otel.GetTextMapPropagator().Extract(t.Context(), carrier)
			if tt.value == "" {
				require.False(t, trace.SpanContextFromContext(received).IsValid())
				return
			}
			require.Equal(t, parent, obs.Traceparent(received), "custom resources carry W3C whatever the propagators are")
		})
	}
}

func TestUnknownPropagatorIsAnError(t *testing.T) {
	t.Setenv("OTEL_PROPAGATORS", "tracecontext,bogus")
	_, _, err := obs.Setup(t.Context(), obs.Options{Service: "test", Output: io.Discard})
	require.ErrorContains(t, err, "OTEL_PROPAGATORS")
	require.ErrorContains(t, err, "bogus")
}

func TestTraceparent(t *testing.T) {
	require.Empty(t, obs.Traceparent(t.Context()))
	for _, invalid := range []string{"", "00-0-0-0", "text"} {
		require.Empty(t, obs.Traceparent(obs.WithTraceparent(t.Context(), invalid)), invalid)
	}
	require.Equal(t, parent, obs.Traceparent(obs.WithTraceparent(t.Context(), parent)))
}

func TestSharedEnviron(t *testing.T) {
	for _, name := range []string{"OTEL_PROPAGATORS", "OTEL_BSP_SCHEDULE_DELAY", "OTEL_TRACES_SAMPLER", "OTEL_EXPORTER_OTLP_ENDPOINT"} {
		t.Setenv(name, "value")
		require.Contains(t, obs.SharedEnviron(), name+"=value")
	}
	t.Setenv("OTEL_SERVICE_NAME", "controller")
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=controller-0")
	require.NotContains(t, obs.SharedEnviron(), "OTEL_SERVICE_NAME=controller")
	require.NotContains(t, obs.SharedEnviron(), "OTEL_RESOURCE_ATTRIBUTES=k8s.pod.name=controller-0")
}

// A sandbox gets a TRACEPARENT although nothing exports its spans.
func TestSpansAreRecordedWithoutExporter(t *testing.T) {
	t.Setenv("OTEL_TRACES_EXPORTER", "none")
	ctx := setup(t, obs.Options{Service: "test"})
	ctx, span := obs.Tracer().Start(ctx, "create")
	defer span.End()
	require.NotEmpty(t, obs.Traceparent(ctx))
}

func TestExporting(t *testing.T) {
	tests := map[string]struct {
		env  map[string]string
		want bool
	}{
		"nothing set":             {nil, false},
		"endpoint":                {map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, true},
		"endpoint of traces":      {map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}, true},
		"exporter":                {map[string]string{"OTEL_TRACES_EXPORTER": "console"}, true},
		"none wins over endpoint": {map[string]string{"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			for _, variable := range []string{"OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"} {
				t.Setenv(variable, tt.env[variable])
			}
			require.Equal(t, tt.want, obs.Exporting())
		})
	}
}

// The batch size limits each export, and the delay is far beyond the test's timeout unless OTEL_BSP_SCHEDULE_DELAY counts.
func TestBatchProcessorReadsItsVariables(t *testing.T) {
	exports := make(chan int, 16)
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw, err := io.ReadAll(r.Body)
		var export collectorv1.ExportTraceServiceRequest
		if err != nil || proto.Unmarshal(raw, &export) != nil {
			http.Error(w, "invalid export", http.StatusBadRequest)
			return
		}
		spans := 0
		for _, resource := range export.GetResourceSpans() {
			for _, scope := range resource.GetScopeSpans() {
				spans += len(scope.GetSpans())
			}
		}
		exports <- spans
	}))
	t.Cleanup(collector.Close)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
	t.Setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
	ctx := setup(t, obs.Options{Service: "test"})
	for range 4 {
		_, span := obs.Tracer().Start(ctx, "work")
		span.End()
	}
	for range 2 { // a full batch does not wait for the delay
		select {
		case spans := <-exports:
			require.Equal(t, 2, spans)
		case <-time.After(testkit.Timeout):
			t.Fatal("a full batch was not exported")
		}
	}
}

func TestVerbosity(t *testing.T) {
	for verbosity, want := range map[int]int{0: 1, 2: 2, 4: 3} {
		var out bytes.Buffer
		log := logr.FromContextOrDiscard(setup(t, obs.Options{Service: "test", Verbosity: verbosity, Output: &out}))
		log.Info("state", obs.KeyPod, "ns/p")
		log.V(2).Info("detail")
		log.V(4).Info("debugging")
		lines := bytes.Split(bytes.TrimSpace(out.Bytes()), []byte("\n"))
		require.Len(t, lines, want, "verbosity %d", verbosity)
		var record map[string]any
		require.NoError(t, json.Unmarshal(lines[0], &record))
		require.Equal(t, "state", record["msg"])
		require.Equal(t, "ns/p", record[obs.KeyPod])
	}
}
