package rpc

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"

	"buf.build/go/protovalidate"
	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// open are the services that every authenticated peer may call.
var open = []string{"grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}

// check is what is asked of each call before its handler sees it, and of each message.
type check struct {
	call    func(ctx context.Context, method string) error
	message func(m any) error
}

func (c check) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if err := c.call(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	if err := c.message(req); err != nil {
		return nil, err
	}
	return handler(ctx, req)
}

func (c check) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if err := c.call(ss.Context(), info.FullMethod); err != nil {
		return err
	}
	return handler(srv, checkedStream{ss, c})
}

type checkedStream struct {
	grpc.ServerStream
	check check
}

// RecvMsg checks each message that it receives.
func (s checkedStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	return s.check.message(m)
}

// authorize allows a call by its method's entry, else by its service's, else to every authenticated peer.
func authorize(allow map[string][]Role, insecure bool) func(context.Context, string) error {
	return func(ctx context.Context, method string) error {
		service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
		if insecure || slices.Contains(open, service) {
			return nil
		}
		roles, ok := allow[method]
		if !ok {
			roles, ok = allow[service]
		}
		role := PeerRole(ctx)
		if !ok || slices.Contains(roles, role) {
			return nil
		}
		return fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied,
			"a certificate of role %q may not call %s", role, method).With("role", string(role))
	}
}

// guarded asks allow and then guard, which no health check and no reflection has to pass.
func guarded(allow, guard func(context.Context, string) error) func(context.Context, string) error {
	if guard == nil {
		return allow
	}
	return func(ctx context.Context, method string) error {
		if err := allow(ctx, method); err != nil {
			return err
		}
		if service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/"); slices.Contains(open, service) {
			return nil
		}
		return guard(ctx, method)
	}
}

// PeerRole is the role of the caller by its certificate, or "" if it showed none.
func PeerRole(ctx context.Context) Role {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.PeerCertificates) == 0 {
		return ""
	}
	return roleOf(info.State.PeerCertificates[0])
}

// validate refuses a message that is too large or breaks one of its protovalidate rules; the first violation names the
// field, the message names all.
func validate(v protovalidate.Validator, maxBytes int) func(any) error {
	return func(m any) error {
		msg, ok := m.(proto.Message)
		if !ok {
			return nil
		}
		if size := proto.Size(msg); size > maxBytes {
			return fault.New(errdefs.ErrInvalidArgument, fault.RequestTooLarge,
				"the request has %d bytes, at most %d are taken", size, maxBytes)
		}
		err := v.Validate(msg)
		var violations *protovalidate.ValidationError
		if !errors.As(err, &violations) || len(violations.Violations) == 0 {
			return err
		}
		texts := make([]string, len(violations.Violations))
		for i, x := range violations.Violations {
			texts[i] = fmt.Sprintf("%s: %s", protovalidate.FieldPathString(x.Proto.GetField()), x.Proto.GetMessage())
		}
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidField, "%s", strings.Join(texts, "; ")).
			With(fault.FieldKey, protovalidate.FieldPathString(violations.Violations[0].Proto.GetField()))
	}
}

func statusUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	resp, err := handler(ctx, req)
	return resp, reveal(ctx, info.FullMethod, err)
}

func statusStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return reveal(ss.Context(), info.FullMethod, handler(srv, ss))
}

// reveal makes a status of err and logs what the status hides.
func reveal(ctx context.Context, method string, err error) error {
	st := ToStatus(err)
	if status.Code(st) == codes.Internal {
		logr.FromContextOrDiscard(ctx).Error(err, "handling call", "method", method)
	}
	return st
}

// recovered turns a handler's panic into an error that carries the stack.
func recovered(_ context.Context, p any) error {
	return fmt.Errorf("handler panicked: %v\n%s", p, debug.Stack())
}

// accessLogger writes the access log: failures of the server as errors, other failures as information, the rest as
// detail.
func accessLogger(log logr.Logger) logging.Logger {
	return logging.LoggerFunc(func(_ context.Context, level logging.Level, msg string, fields ...any) {
		switch level {
		case logging.LevelError:
			log.Error(nil, msg, fields...)
		case logging.LevelDebug:
			log.V(2).Info(msg, fields...)
		default:
			log.Info(msg, fields...)
		}
	})
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

// notOpen leaves the probes and the reflection out of the access log.
func notOpen(_ context.Context, meta interceptors.CallMeta) bool {
	return !slices.Contains(open, meta.Service)
}
