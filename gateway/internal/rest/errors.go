package rest

import (
	"context"
	"errors"
	"math"
	"net/http"
	"regexp"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// handleError answers with the error of a call, or of decoding the request.
func (a *api) handleError(ctx context.Context, _ *runtime.ServeMux, _ runtime.Marshaler, w http.ResponseWriter, r *http.Request, err error) {
	var own *runtime.HTTPStatusError
	code := 0
	if errors.As(err, &own) {
		code, err = own.HTTPStatus, own.Err
	}
	a.writeError(ctx, w, err, code)
}

// handleRoutingError answers a path or a method outside the API.
func (a *api) handleRoutingError(ctx context.Context, _ *runtime.ServeMux, _ runtime.Marshaler, w http.ResponseWriter, r *http.Request, code int) {
	switch code {
	case http.StatusNotFound:
		a.writeStatus(ctx, w, ownStatus(codes.NotFound, "no such path: "+r.URL.Path), code)
	case http.StatusMethodNotAllowed:
		w.Header().Set("Allow", a.routes.allowed(r.URL.Path))
		a.writeStatus(ctx, w, ownStatus(codes.Unimplemented, r.Method+" is not allowed on "+r.URL.Path), code)
	default:
		a.writeStatus(ctx, w, ownStatus(codes.InvalidArgument, "invalid path"), http.StatusBadRequest)
	}
}

// ownStatus returns a status of the gateway itself, for which the API has no reason.
func ownStatus(code codes.Code, message string) *status.Status {
	st, err := status.New(code, message).WithDetails(&errdetails.ErrorInfo{
		Reason: strings.TrimPrefix(sandboxv1.ErrorReason_ERROR_REASON_UNSPECIFIED.String(), "ERROR_REASON_"), Domain: rpc.Domain,
	})
	if err != nil { // an ErrorInfo always marshals
		return status.New(code, message)
	}
	return st
}

// statusOf returns the status to send for an error. A status of an upstream is sent unchanged; any other error gets the
// details that every error of the API has.
func (a *api) statusOf(ctx context.Context, err error) *status.Status {
	st, ok := status.FromError(err)
	switch {
	case !ok:
		st, _ = status.FromError(rpc.ToStatus(err))
		return st
	case hasInfo(st):
		return st
	}
	switch st.Code() {
	case codes.InvalidArgument: // from grpc-gateway, which adds no details
		return convert(invalid(st.Message()))
	case codes.Unavailable: // from the gRPC client; its text contains addresses
		a.config.Log.Info("upstream unreachable", obs.KeyUpstream, upstreamOf(ctx), obs.KeyError, st.Message())
		return convert(fault.New(errdefs.ErrUnavailable, "UNSPECIFIED", "the %s cannot be reached", upstreamOf(ctx)))
	case codes.DeadlineExceeded:
		return convert(fault.New(context.DeadlineExceeded, fault.DeadlineExceeded, "the deadline passed before the call was done"))
	case codes.Canceled:
		return convert(fault.New(context.Canceled, fault.Cancelled, "the caller canceled the request"))
	case codes.Internal, codes.Unknown:
		a.config.Log.Error(err, "calling upstream", obs.KeyUpstream, upstreamOf(ctx), obs.KeyRequestID, exchangeOf(ctx).requestID)
		return convert(fault.New(errdefs.ErrInternal, fault.Internal, "internal error"))
	default:
		return ownStatus(st.Code(), st.Message())
	}
}

// upstreamOf returns the name of the component that a request is for.
func upstreamOf(ctx context.Context) string {
	if b := exchangeOf(ctx).binding; b != nil {
		return b.upstream.name
	}
	return allocatorName
}

func convert(err error) *status.Status { return status.Convert(rpc.ToStatus(err)) }

func hasInfo(st *status.Status) bool {
	for _, d := range st.Details() {
		if _, ok := d.(*errdetails.ErrorInfo); ok {
			return true
		}
	}
	return false
}

// fieldPatterns find the field in the error texts of protojson and grpc-gateway, which have it nowhere else. A test checks
// them against the libraries in use.
func fieldPatterns() []*regexp.Regexp {
	return []*regexp.Regexp{
		regexp.MustCompile(`unknown field "([^"]+)"`),
		regexp.MustCompile(`could not find field "([^"]+)"`),
		regexp.MustCompile(`invalid value for \S+ (?:field|type) ([\w.]+)`),
		regexp.MustCompile(`invalid value for \S+ ([\w.]+) field`),
		regexp.MustCompile(`parameter: ([\w.]+)`),
		regexp.MustCompile(`parsing (?:field|list|map key|map value) "([^"]+)"`),
		regexp.MustCompile(`duplicate field "([^"]+)"`),
	}
}

// invalid converts an error text of grpc-gateway about a request. An error without a field is one of the body.
func invalid(message string) error {
	message = strings.ReplaceAll(strings.TrimPrefix(strings.ReplaceAll(message, "\u00a0", " "), "proto: "), "proto: ", "")
	for _, p := range fieldPatterns() {
		if m := p.FindStringSubmatch(message); m != nil {
			return fault.Field(m[1], "%s", message)
		}
	}
	return fault.Field("body", "%s", message)
}

// writeError answers with err and the HTTP code; 0 means the code of the status.
func (a *api) writeError(ctx context.Context, w http.ResponseWriter, err error, code int) {
	a.writeStatus(ctx, w, a.statusOf(ctx, err), code)
}

func (a *api) writeStatus(_ context.Context, w http.ResponseWriter, st *status.Status, code int) {
	if code == 0 {
		code = runtime.HTTPStatusFromCode(st.Code())
	}
	if code == http.StatusTooManyRequests || code == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", retryAfter(st))
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Del("Content-Length")
	w.WriteHeader(code)
	if _, err := w.Write(append(a.statusJSON(st), '\n')); err != nil { //nolint:gosec // JSON, declared so and not sniffed
		a.config.Log.V(2).Info("writing response", obs.KeyError, err.Error())
	}
}

// statusJSON returns {"code":...,"message":...,"details":[...]}. Details of unknown types are left out.
func (a *api) statusJSON(st *status.Status) []byte {
	out, err := protojson.Marshal(st.Proto())
	if err != nil {
		out, err = protojson.Marshal(status.New(st.Code(), st.Message()).Proto())
	}
	if err != nil {
		return []byte(`{"code":13,"message":"internal error"}`)
	}
	return compact(out)
}

// retryAfter returns the RetryInfo of the status in whole seconds, at least one.
func retryAfter(st *status.Status) string {
	seconds := 1.0
	for _, d := range st.Details() {
		if r, ok := d.(*errdetails.RetryInfo); ok {
			seconds = max(seconds, math.Ceil(r.GetRetryDelay().AsDuration().Seconds()))
		}
	}
	return strconv.Itoa(int(seconds))
}
