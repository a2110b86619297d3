package rpc

import (
	"context"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// logKeys maps the middleware's field names to log keys. Other fields are omitted: the method has the service and the trace
// has the rest.
var logKeys = map[string]string{
	"grpc.code": obs.KeyCode, "grpc.error": obs.KeyError, "peer.address": obs.KeyAddress,
	obs.KeyDuration: obs.KeyDuration, obs.KeyRequestID: obs.KeyRequestID,
}

// accessLogOptions configure one record for each finished call.
func accessLogOptions() []logging.Option {
	return []logging.Option{
		logging.WithLogOnEvents(logging.FinishCall),
		logging.WithLevels(levelOf),
		logging.WithDurationField(func(d time.Duration) logging.Fields { return logging.Fields{obs.KeyDuration, d.String()} }),
	}
}

// accessLogger writes the access log: failures of the server as errors, other failures at level 0, successes at level 2.
func accessLogger(log logr.Logger) logging.Logger {
	return logging.LoggerFunc(func(ctx context.Context, level logging.Level, msg string, fields ...any) {
		log := log.WithValues(logValues(ctx, fields)...)
		switch level {
		case logging.LevelError:
			log.Error(nil, msg)
		case logging.LevelDebug:
			log.V(2).Info(msg)
		default:
			log.Info(msg)
		}
	})
}

// logValues returns the middleware's fields under the keys that all components use.
func logValues(ctx context.Context, fields logging.Fields) []any {
	var service, method any
	values := []any{}
	for i := fields.Iterator(); i.Next(); {
		switch key, value := i.At(); key {
		case logging.ServiceFieldKey:
			service = value
		case logging.MethodFieldKey:
			method = value
		default:
			if key, ok := logKeys[key]; ok {
				values = append(values, key, value)
			}
		}
	}
	if service, ok := service.(string); ok {
		if method, ok := method.(string); ok {
			values = append(values, obs.KeyMethod, "/"+service+"/"+method)
		}
	}
	if span := trace.SpanContextFromContext(ctx); span.HasTraceID() {
		values = append(values, obs.KeyTraceID, span.TraceID().String())
	}
	return values
}

// identify records the request_id of a request, if it has one, on the span of its call and in the access log.
func identify(ctx context.Context, request any) {
	m, ok := request.(interface{ GetRequestId() string })
	if !ok || m.GetRequestId() == "" {
		return
	}
	id := m.GetRequestId()
	trace.SpanFromContext(ctx).SetAttributes(attribute.String(obs.AttrRequestID, id))
	logging.AddFields(ctx, logging.Fields{obs.KeyRequestID, id})
}

func levelOf(code codes.Code) logging.Level {
	switch code {
	case codes.OK, codes.Canceled:
		return logging.LevelDebug
	case codes.Internal, codes.DataLoss, codes.Unknown:
		return logging.LevelError
	default:
		return logging.LevelInfo
	}
}

// isLogged excludes health checks and reflection from the access log.
func isLogged(_ context.Context, meta interceptors.CallMeta) bool {
	return !slices.Contains(openServices, meta.Service)
}
