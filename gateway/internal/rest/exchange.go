package rest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"strconv"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

const (
	requestIDHeader   = "X-Request-Id"
	idempotencyHeader = "Idempotency-Key"
	maxRequestID      = 128
	unmatched         = "unmatched" // the route label of a path outside the API
)

// exchange is one request and its answer.
type exchange struct {
	http.ResponseWriter
	requestID, idempotencyKey string
	// route is the pattern that matched. The number of patterns is bounded, so it can be a label.
	route string
	// binding is the route of the API that matched; nil outside the API.
	binding *route
	code    int
}

type exchangeKey struct{}

// exchangeOf returns the exchange of a request; an empty one if ctx is not of a request.
func exchangeOf(ctx context.Context) *exchange {
	if e, ok := ctx.Value(exchangeKey{}).(*exchange); ok {
		return e
	}
	return &exchange{}
}

// WriteHeader implements http.ResponseWriter and records the code.
func (e *exchange) WriteHeader(code int) {
	if e.code == 0 {
		e.code = code
	}
	e.ResponseWriter.WriteHeader(code)
}

// Write implements http.ResponseWriter and records that the answer has begun.
func (e *exchange) Write(p []byte) (int, error) {
	if e.code == 0 {
		e.code = http.StatusOK
	}
	return e.ResponseWriter.Write(p)
}

// Flush implements http.Flusher, which the gRPC server asks for.
func (e *exchange) Flush() { _ = http.NewResponseController(e.ResponseWriter).Flush() }

// Unwrap lets http.ResponseController reach the connection.
func (e *exchange) Unwrap() http.ResponseWriter { return e.ResponseWriter }

// exchanged adds an exchange to each request, and logs and counts the request at its end.
func (a *api) exchanged(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e := &exchange{ResponseWriter: w, requestID: requestID(r), idempotencyKey: r.Header.Get(idempotencyHeader), route: unmatched}
		w.Header().Set(requestIDHeader, e.requestID)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		begin := a.config.Clock.Now()
		defer func() {
			abort := a.survive(e, r, recover())
			took := a.config.Clock.Since(begin)
			a.metrics.observe(e, r.Method, took)
			log := a.config.Log
			if e.code < http.StatusBadRequest {
				log = log.V(2)
			}
			log.Info("served request", obs.KeyMethod, r.Method, obs.KeyPath, r.URL.Path, obs.KeyCode, e.code,
				obs.KeyDuration, took.String(), obs.KeyRequestID, e.requestID)
			if abort {
				panic(http.ErrAbortHandler) // aborts the connection, as net/http defines
			}
		}()
		next.ServeHTTP(e, r.WithContext(context.WithValue(r.Context(), exchangeKey{}, e)))
	})
}

// survive converts a panic of a handler into an answer. It reports whether the connection has to be aborted: if an answer has
// begun, it must not look complete.
func (a *api) survive(e *exchange, r *http.Request, p any) (abort bool) {
	if p == nil {
		return false
	}
	if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		return true
	}
	a.config.Log.Error(fmt.Errorf("panic: %v", p), "handling request", obs.KeyPath, r.URL.Path, obs.KeyStack, string(debug.Stack()))
	if e.code != 0 {
		return true
	}
	a.writeError(r.Context(), e, fault.New(errdefs.ErrInternal, fault.Internal, "internal error"), 0)
	return false
}

// requestID returns the caller's id if it is safe in headers and logs, else a new one.
func requestID(r *http.Request) string {
	id := r.Header.Get(requestIDHeader)
	if id == "" || len(id) > maxRequestID {
		return uuid.NewString()
	}
	for _, c := range []byte(id) {
		if c <= ' ' || c > '~' {
			return uuid.NewString()
		}
	}
	return id
}

// routed records the route of a request, for labels and for its span.
func (a *api) routed(next runtime.HandlerFunc) runtime.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request, params map[string]string) {
		e := exchangeOf(r.Context())
		if p, ok := runtime.HTTPPattern(r.Context()); ok {
			e.route = p.String()
			e.binding = a.routes.of(r.Method, e.route)
			span := trace.SpanFromContext(r.Context())
			span.SetName(r.Method + " " + e.route)
			span.SetAttributes(attribute.String(obs.AttrHTTPRoute, e.route), attribute.String(obs.AttrRequestID, e.requestID))
			for key, value := range params {
				if attr := pathAttribute(key); attr != "" {
					span.SetAttributes(attribute.String(attr, value))
				}
			}
		}
		next(w, r, params)
	}
}

// pathAttribute returns the span attribute of a path parameter; "" if it has none.
func pathAttribute(parameter string) string {
	switch parameter {
	case "namespace", "sandbox.namespace":
		return obs.AttrSandboxNamespace
	case "name", "sandbox.name":
		return obs.AttrSandboxName
	case "pool":
		return obs.AttrPool
	}
	return ""
}

func codeLabel(code int) string {
	if code == 0 {
		return "aborted"
	}
	return strconv.Itoa(code)
}
