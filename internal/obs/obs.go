// Package obs sets up the telemetry of a process: logs (logr over one slog JSON handler), traces (OpenTelemetry, configured
// by the standard OTEL_ environment variables) and metrics (a separate Prometheus registry). names.go defines every span
// attribute and log key. The package holds no state beyond the process-wide hooks of those libraries. Setup is called
// once, by internal/daemon or by the main function of fsb-ctl; everything else is safe for concurrent use.
package obs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/contrib/exporters/autoexport"
	"go.opentelemetry.io/contrib/propagators/autoprop"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/grpclog"
	"k8s.io/klog/v2"
	crlog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/fast-sandbox/fast-sandbox/internal/config"
)

const scope = "github.com/fast-sandbox/fast-sandbox"

// Options describes a process to its telemetry.
type Options struct {
	// Service is the service.name of the process's spans. OTEL_SERVICE_NAME overrides it.
	Service string
	// Version is the service.version of the process's spans.
	Version string
	// Verbosity of logs: 0 for state changes, 2 for details, 4 for debugging.
	Verbosity int
	// Output of logs. Nil: standard error.
	Output io.Writer
}

// Setup installs logging and tracing for the whole process. The returned context carries the logger. The returned function
// exports the remaining spans and blocks until that is done or its context ends. An OTEL_ variable with an invalid value
// is an error, so that a misspelled one does not silently switch tracing off.
func Setup(ctx context.Context, o Options) (context.Context, func(context.Context) error, error) {
	log := newLogger(o)
	klog.SetLoggerWithOptions(log, klog.ContextualLogger(true))
	crlog.SetLogger(log)
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(lineLogger(log.V(4)), lineLogger(log.V(2)), lineLogger(log)))
	otel.SetLogger(log.V(2))
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.V(2).Info("exporting telemetry failed", KeyError, err.Error()) }))
	propagator, err := newPropagator()
	if err != nil {
		return nil, nil, err
	}
	otel.SetTextMapPropagator(propagator)
	provider, err := newTracerProvider(ctx, o)
	if err != nil {
		return nil, nil, err
	}
	otel.SetTracerProvider(provider)
	return logr.NewContext(ctx, log), provider.Shutdown, nil
}

// Tracer returns the tracer of the spans that are not made by a library's instrumentation.
func Tracer() trace.Tracer { return otel.Tracer(scope) }

// Exporting reports whether the environment configures an exporter for traces.
func Exporting() bool {
	if e := config.Env("OTEL_TRACES_EXPORTER"); e != "" {
		return e != "none"
	}
	return config.Env("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || config.Env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
}

// SharedEnviron returns the OTEL_ variables (NAME=value) of this process that configure any other component in the same
// way. The variables that describe this process alone are left out.
func SharedEnviron() []string {
	return slices.DeleteFunc(config.Environ("OTEL_"), func(kv string) bool {
		return strings.HasPrefix(kv, "OTEL_SERVICE_NAME=") || strings.HasPrefix(kv, "OTEL_RESOURCE_ATTRIBUTES=")
	})
}

// Traceparent returns the W3C traceparent of the span in ctx, or "" without one. Custom resources, tombstones and sandboxed
// processes carry this format, whatever OTEL_PROPAGATORS selects between processes.
func Traceparent(ctx context.Context) string {
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier["traceparent"]
}

// WithTraceparent returns a context whose remote parent span is the one that tp names. It returns ctx if tp names none.
func WithTraceparent(ctx context.Context, tp string) context.Context {
	if tp == "" {
		return ctx
	}
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{"traceparent": tp})
}

// newPropagator returns the propagators that OTEL_PROPAGATORS selects, by default tracecontext and baggage.
func newPropagator() (propagation.TextMapPropagator, error) {
	names := config.Env("OTEL_PROPAGATORS")
	if names == "" {
		names = "tracecontext,baggage"
	}
	propagator, err := autoprop.TextMapPropagator(strings.Split(strings.ReplaceAll(names, " ", ""), ",")...)
	if err != nil {
		return nil, fmt.Errorf("reading OTEL_PROPAGATORS=%s: %w", names, err)
	}
	return propagator, nil
}

// newTracerProvider records spans even without an exporter, so that a sandbox always has a TRACEPARENT. The SDK itself reads
// OTEL_TRACES_SAMPLER, OTEL_BSP_* and OTEL_SPAN_* unless an option overrides them; no option here does.
func newTracerProvider(ctx context.Context, o Options) (*sdktrace.TracerProvider, error) {
	res, err := resource.New(ctx, resource.WithAttributes(
		attribute.String("service.name", o.Service), attribute.String("service.version", o.Version)),
		resource.WithHost(), resource.WithFromEnv())
	if err != nil && !errors.Is(err, resource.ErrPartialResource) {
		return nil, fmt.Errorf("describing this process for traces: %w", err)
	}
	options := []sdktrace.TracerProviderOption{sdktrace.WithResource(res)}
	if Exporting() {
		exporter, err := autoexport.NewSpanExporter(ctx)
		if err != nil {
			return nil, fmt.Errorf("creating the span exporter that the OTEL_ variables select: %w", err)
		}
		options = append(options, sdktrace.WithBatcher(exporter))
	}
	return sdktrace.NewTracerProvider(options...), nil
}

func newLogger(o Options) logr.Logger {
	if o.Output == nil {
		o.Output = os.Stderr
	}
	// logr's V(n) maps to slog's level -n.
	return logr.FromSlogHandler(slog.NewJSONHandler(o.Output, &slog.HandlerOptions{Level: slog.Level(-o.Verbosity)}))
}

// lineLogger returns a writer that logs each line that a library writes.
func lineLogger(log logr.Logger) io.Writer {
	if !log.Enabled() {
		return io.Discard
	}
	return lineWriter{log}
}

type lineWriter struct{ log logr.Logger }

// Write logs p as one record.
func (w lineWriter) Write(p []byte) (int, error) {
	w.log.Info("grpc", KeyLine, string(p))
	return len(p), nil
}
