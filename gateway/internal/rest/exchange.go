package rest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"strconv"

	"github.com/google/uuid"
	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	requestIDHeader   = "X-Request-Id"
	idempotencyHeader = "Idempotency-Key"
	maxRequestID      = 128
	unmatched         = "unmatched" // the route label of a path that is none of ours
)

// exchange is what is known of one request and its answer.
type exchange struct {
	http.ResponseWriter
	requestID, idempotencyKey string
	// route is the pattern that matched; bounded, so it can be a label.
	route string
	code  int
}

type exchangeKey struct{}

// exchangeOf is the request's exchange; an empty one outside of a request of ours.
func exchangeOf(ctx context.Context) *exchange {
	if e, ok := ctx.Value(exchangeKey{}).(*exchange); ok {
		return e
	}
	return &exchange{}
}

// WriteHeader notes the code.
func (e *exchange) WriteHeader(code int) {
	if e.code == 0 {
		e.code = code
	}
	e.ResponseWriter.WriteHeader(code)
}

// Write notes that the answer has begun.
func (e *exchange) Write(p []byte) (int, error) {
	if e.code == 0 {
		e.code = http.StatusOK
	}
	return e.ResponseWriter.Write(p)
}

// Unwrap lets http.ResponseController reach the connection.
func (e *exchange) Unwrap() http.ResponseWriter { return e.ResponseWriter }

// exchanged gives each request its exchange, and tells of it afterwards.
func (a *api) exchanged(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e := &exchange{ResponseWriter: w, requestID: requestID(r), idempotencyKey: r.Header.Get(idempotencyHeader), route: unmatched}
		w.Header().Set(requestIDHeader, e.requestID)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		r.Header.Del("Authorization") // not ours, and grpc-gateway would hand it on
		begin := a.config.Clock.Now()
		defer func() {
			p := recover()
			a.survive(e, r, p)
			took := a.config.Clock.Since(begin)
			a.metrics.observe(e, r.Method, took)
			log := a.config.Log
			if e.code < http.StatusBadRequest {
				log = log.V(2)
			}
			log.Info("served", "method", r.Method, "path", r.URL.Path, "code", e.code, "took", took.String(), "requestID", e.requestID)
			if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
				panic(p) // net/http's way to break the connection off
			}
		}()
		next.ServeHTTP(e, r.WithContext(context.WithValue(r.Context(), exchangeKey{}, e)))
	})
}

// survive turns a handler's panic into an answer, or into a broken connection where an answer has begun.
func (a *api) survive(e *exchange, r *http.Request, p any) {
	if err, ok := p.(error); p == nil || ok && errors.Is(err, http.ErrAbortHandler) {
		return
	}
	a.config.Log.Error(fmt.Errorf("panic: %v", p), "handling request", "path", r.URL.Path, "stack", string(debug.Stack()))
	if e.code == 0 {
		a.writeStatus(r.Context(), e, status.New(codes.Internal, "internal error"), 0)
	}
}

// requestID is the caller's own if it can go into headers and logs as it is, else a new one.
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

// routed notes the pattern of a request, for labels and for its span.
func (a *api) routed(next runtime.HandlerFunc) runtime.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request, params map[string]string) {
		e := exchangeOf(r.Context())
		if p, ok := runtime.HTTPPattern(r.Context()); ok {
			e.route = p.String()
			span := trace.SpanFromContext(r.Context())
			span.SetName(r.Method + " " + e.route)
			span.SetAttributes(attribute.String("http.route", e.route), attribute.String("fastsandbox.request_id", e.requestID))
			for key, value := range params {
				span.SetAttributes(attribute.String("fastsandbox."+key, value))
			}
		}
		next(w, r, params)
	}
}

func codeLabel(code int) string {
	if code == 0 {
		return "aborted"
	}
	return strconv.Itoa(code)
}
