// Package obs sets up what a process tells of itself: logs (logr over one slog JSON handler), traces (OpenTelemetry,
// exported as the standard OTEL_ variables say) and metrics (a registry of its own). It holds no state beyond the
// process-wide hooks that those libraries have; Setup is called once, from internal/daemon or the command line's main.
package obs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/contrib/exporters/autoexport"
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

// Options says who a process is and how much it tells.
type Options struct {
	// Service is the service.name of its spans, unless OTEL_SERVICE_NAME says otherwise.
	Service string
	// Version is the service.version of its spans.
	Version string
	// Verbosity of logs: 0 for state changes, 2 for details, 4 for debugging.
	Verbosity int
	// Output of logs; nil means standard error.
	Output io.Writer
}

// Setup installs logging and tracing for the whole process. The returned context carries the logger; the returned
// function flushes what is still to be exported, within its context's time.
func Setup(ctx context.Context, o Options) (context.Context, func(context.Context) error, error) {
	log := newLogger(o)
	klog.SetLoggerWithOptions(log, klog.ContextualLogger(true))
	crlog.SetLogger(log)
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(lineLogger(log.V(4)), lineLogger(log.V(2)), lineLogger(log)))
	otel.SetLogger(log.V(2))
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.V(2).Info("exporting telemetry", "err", err.Error()) }))
	otel.SetTextMapPropagator(propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}))
	provider, err := newTracerProvider(ctx, o)
	if err != nil {
		return nil, nil, err
	}
	otel.SetTracerProvider(provider)
	return logr.NewContext(ctx, log), provider.Shutdown, nil
}

// Tracer is the tracer of the spans that the project makes by hand.
func Tracer() trace.Tracer { return otel.Tracer(scope) }

// Exporting tells whether the environment asks for traces to be exported.
func Exporting() bool {
	if e := config.Env("OTEL_TRACES_EXPORTER"); e != "" {
		return e != "none"
	}
	return config.Env("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || config.Env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
}

// Traceparent is the W3C traceparent of the span in ctx, or "" if there is none.
func Traceparent(ctx context.Context) string {
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier["traceparent"]
}

// WithTraceparent returns a context whose remote parent span is the one that tp names; ctx itself if tp names none.
func WithTraceparent(ctx context.Context, tp string) context.Context {
	if tp == "" {
		return ctx
	}
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{"traceparent": tp})
}

// newTracerProvider makes spans even when nothing exports them, so that a sandbox always has a TRACEPARENT.
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
			return nil, fmt.Errorf("making the span exporter of the OTEL_ variables: %w", err)
		}
		options = append(options, sdktrace.WithBatcher(exporter))
	}
	return sdktrace.NewTracerProvider(options...), nil
}

func newLogger(o Options) logr.Logger {
	if o.Output == nil {
		o.Output = os.Stderr
	}
	// logr's V(n) is slog's level -n.
	return logr.FromSlogHandler(slog.NewJSONHandler(o.Output, &slog.HandlerOptions{Level: slog.Level(-o.Verbosity)}))
}

// lineLogger turns the lines that a library writes into log records.
func lineLogger(log logr.Logger) io.Writer {
	if !log.Enabled() {
		return io.Discard
	}
	return lineWriter{log}
}

type lineWriter struct{ log logr.Logger }

// Write logs p as one record.
func (w lineWriter) Write(p []byte) (int, error) {
	w.log.Info("grpc", "line", string(p))
	return len(p), nil
}
