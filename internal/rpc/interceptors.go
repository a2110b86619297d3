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
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// openServices are the services that every authenticated peer may call.
var openServices = []string{"grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}

// check holds the checks of each call, before its handler runs, and of each received message.
type check struct {
	call    func(ctx context.Context, method string) error
	message func(m any) error
}

func (c check) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	identify(ctx, req)
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

// RecvMsg checks each message.
func (s checkedStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	identify(s.Context(), m)
	return s.check.message(m)
}

// authorize returns a check of the caller's role against the entry of the method, else against that of its service. Without
// an entry every authenticated peer may call.
func authorize(allow map[string][]Role, insecure bool) func(context.Context, string) error {
	return func(ctx context.Context, method string) error {
		service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
		if insecure || slices.Contains(openServices, service) {
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
			"role %q may not call %s", role, method).With("role", string(role))
	}
}

// guarded returns a check by allow and then by guard. Calls of the health and reflection services skip guard.
func guarded(allow, guard func(context.Context, string) error) func(context.Context, string) error {
	if guard == nil {
		return allow
	}
	return func(ctx context.Context, method string) error {
		if err := allow(ctx, method); err != nil {
			return err
		}
		if service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/"); slices.Contains(openServices, service) {
			return nil
		}
		return guard(ctx, method)
	}
}

// PeerRole returns the role in the caller's certificate, or "" without a certificate.
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

// validate refuses a message that is too large or breaks one of its protovalidate rules, with one
// violation for each of those.
func validate(v protovalidate.Validator, maxBytes int) func(any) error {
	return func(m any) error {
		msg, ok := m.(proto.Message)
		if !ok {
			return nil
		}
		if size := proto.Size(msg); size > maxBytes {
			return fault.New(errdefs.ErrInvalidArgument, fault.RequestTooLarge,
				"request of %d bytes exceeds the limit of %d bytes", size, maxBytes)
		}
		err := v.Validate(msg)
		var violations *protovalidate.ValidationError
		if !errors.As(err, &violations) || len(violations.Violations) == 0 {
			return err
		}
		all := make([]fault.Violation, len(violations.Violations))
		for i, x := range violations.Violations {
			all[i] = fault.Violation{Field: protovalidate.FieldPathString(x.Proto.GetField()), Message: x.Proto.GetMessage()}
		}
		return fault.Fields(all[0], all[1:]...)
	}
}

func statusUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	resp, err := handler(ctx, req)
	return resp, statusOf(ctx, info.FullMethod, err)
}

func statusStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return statusOf(ss.Context(), info.FullMethod, handler(srv, ss))
}

// statusOf converts err and logs the errors whose text the status omits.
func statusOf(ctx context.Context, method string, err error) error {
	st := ToStatus(err)
	if status.Code(st) == codes.Internal {
		logr.FromContextOrDiscard(ctx).Error(err, "handling call", obs.KeyMethod, method)
	}
	return st
}

// recovered converts a panic of a handler to an error that carries the stack.
func recovered(_ context.Context, p any) error {
	return fmt.Errorf("handler panicked: %v\n%s", p, debug.Stack())
}
