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
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"
	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// openServices are the services that every authenticated peer may call.
var openServices = []string{"grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}

// check holds the checks of each call, before its handler runs, and of each received message. The first returns the context of
// the handler. enter counts the call until done is called.
type check struct {
	call    func(ctx context.Context, method string) (context.Context, error)
	enter   func(ctx context.Context, method string, stream bool) (done func(), err error)
	message func(ctx context.Context, method string, m any) error
	// more checks what follows the first message of a stream.
	more func(m any) error
}

func (c check) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	identify(ctx, req)
	ctx, err := c.call(ctx, info.FullMethod)
	if err != nil {
		return nil, err
	}
	done, err := c.enter(ctx, info.FullMethod, false)
	if err != nil {
		return nil, err
	}
	defer done()
	if err := c.message(ctx, info.FullMethod, req); err != nil {
		return nil, err
	}
	return handler(ctx, req)
}

func (c check) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx, err := c.call(ss.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	done, err := c.enter(ctx, info.FullMethod, true)
	if err != nil {
		return err
	}
	defer done()
	return handler(srv, &checkedStream{contextStream: contextStream{ss, ctx}, check: c, method: info.FullMethod})
}

type checkedStream struct {
	contextStream
	check  check
	method string
	// begun: the first message was checked.
	begun bool
}

// RecvMsg checks each message. The first one says what the call is about, and whether its caller may make it is decided by that alone.
func (s *checkedStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	if s.begun {
		return s.check.more(m)
	}
	s.begun = true
	identify(s.Context(), m)
	return s.check.message(s.Context(), s.method, m)
}

// admission decides which calls a server handles.
type admission struct {
	allow    map[string][]Role
	users    *Users
	guard    func(ctx context.Context, method string) error
	insecure bool
	validate func(m any) error
	// stranger counts a call without valid credentials.
	stranger func(ctx context.Context)
}

// call admits a call by the role of its peer, or, if a user makes it, by whether users may call the method at all. The rights of
// a user depend on the request, which message checks.
func (a *admission) call(ctx context.Context, method string) (context.Context, error) {
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	known := ctx
	if a.users != nil && !a.insecure {
		var err error
		if known, err = a.authenticate(ctx, method); err != nil {
			return nil, err
		}
	}
	if slices.Contains(openServices, service) {
		return ctx, nil // for every caller
	}
	if err := a.admit(known, service, method); err != nil {
		return nil, err
	}
	if a.guard == nil {
		return known, nil
	}
	return known, a.guard(known, method)
}

// tap refuses a call without any proof of who makes it before its message is read, and without a goroutine for it: a stranger who opens
// and resets streams as fast as it can would otherwise take hundreds of MiB. It does no I/O, because the connection waits for it.
func (a *admission) tap(ctx context.Context, info *tap.Info) (context.Context, error) {
	if a.users == nil || a.insecure || peerCertificate(ctx) != nil || len(info.Header.Get(authorizationKey)) > 0 {
		return ctx, nil
	}
	err := unauthenticated()
	a.users.refused(ctx, auth.Caller{Address: peerAddress(ctx)}, info.FullMethodName, err)
	a.stranger(ctx)
	return nil, ToStatus(err)
}

// authenticate returns the context of a call with its user, if there is one, and counts the request.
func (a *admission) authenticate(ctx context.Context, method string) (context.Context, error) {
	known, err := a.users.authenticate(ctx)
	if err != nil {
		a.users.refused(ctx, auth.Caller{Address: peerAddress(ctx)}, method, err)
		if errdefs.IsUnauthorized(err) || errdefs.IsResourceExhausted(err) { // not if the caller gave up, or no API server answered
			a.stranger(ctx)
		}
		return nil, err
	}
	if c, ok := auth.CallerOf(known); ok {
		if err := a.users.Limits.Request(c.User); err != nil {
			a.users.refused(known, c, method, err)
			return nil, err
		}
	}
	return known, nil
}

// enter counts a call of a user until done is called.
func (a *admission) enter(ctx context.Context, method string, stream bool) (done func(), err error) {
	if a.users == nil || a.insecure {
		return func() {}, nil
	}
	return a.users.enter(ctx, method, stream)
}

func (a *admission) admit(ctx context.Context, service, method string) error {
	if a.insecure {
		return nil
	}
	if c, ok := auth.CallerOf(ctx); ok {
		if _, open := a.users.open(method); !open {
			err := closed(c, method)
			a.users.record(ctx, c, method, nil, "", err)
			return err
		}
		return nil
	}
	roles, ok := a.allow[method]
	if !ok {
		roles = a.allow[service]
	}
	role := PeerRole(ctx)
	if slices.Contains(roles, role) {
		return nil
	}
	return fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied,
		"role %q may not call %s", role, method).With("role", string(role))
}

// message checks a request, and whether the user who sent it may do what it asks.
func (a *admission) message(ctx context.Context, method string, m any) error {
	err := a.validate(m)
	c, ok := auth.CallerOf(ctx)
	if !ok || a.users == nil || a.insecure {
		return err // of a component, which admit has allowed
	}
	reason := ""
	if err == nil {
		reason, err = a.users.authorize(ctx, c, method, m)
	}
	a.users.record(ctx, c, method, m, reason, err)
	return err
}

// PeerRole returns the role in the caller's certificate, or "" without one.
func PeerRole(ctx context.Context) Role { return roleOrNone(peerCertificate(ctx)) }

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
