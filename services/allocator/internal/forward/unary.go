package forward

import (
	"context"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/leadership"
)

// Unary is the interceptor of unary calls.
func (f *Forwarder) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if !f.forwards(info.FullMethod) {
		return handler(ctx, req)
	}
	var resp any
	perhaps := false // an earlier call may have been executed
	err := f.route(ctx, call{
		local: func() (done bool, err error) {
			resp, err = handler(ctx, req)
			if fault.ReasonOf(err) != fault.NotLeader {
				return true, err
			}
			perhaps = perhaps || fault.IsUnsettled(err)
			return !again(nil, rpc.ToStatus(err), repeatable(req)), err // an agent knows another leader
		},
		remote: func(ctx context.Context, conn *grpc.ClientConn, leader epoch) (bool, error) {
			_, reply, err := messages(info.FullMethod)
			if err != nil {
				return true, err
			}
			ctx, stop := f.during(ctx, leader, repeatable(req))
			defer stop()
			var trailer metadata.MD
			err = conn.Invoke(outgoing(ctx), info.FullMethod, req, reply, grpc.Trailer(&trailer))
			if again(context.Cause(ctx), err, repeatable(req)) {
				perhaps = perhaps || !untouched(err)
				return false, err
			}
			resp = reply
			_ = grpc.SetTrailer(ctx, passed(trailer))
			return true, err
		},
	})
	if del, ok := req.(*sandboxv1.DeleteSandboxRequest); ok && perhaps && reasonOf(rpc.ToStatus(err)) == fault.SandboxNotFound {
		return deleted(del), nil
	}
	if _, create := req.(*sandboxv1.CreateSandboxRequest); create && perhaps {
		err = fault.Unsettled(rpc.FromStatus(rpc.ToStatus(err))) // the error is that of the last call alone
	}
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// deleted returns the answer to a delete whose first call deleted the sandbox and was not answered. The repeated call finds
// nothing, which is success for its caller.
func deleted(req *sandboxv1.DeleteSandboxRequest) *sandboxv1.DeleteSandboxResponse {
	return &sandboxv1.DeleteSandboxResponse{Sandbox: &sandboxv1.Sandbox{
		Namespace: req.GetNamespace(), Name: req.GetName(), Uid: req.GetUid(),
		Status: &sandboxv1.SandboxStatus{Phase: sandboxv1.Phase_PHASE_TERMINATING},
	}}
}

// during returns a context that ends, with the cause errChanged, when another replica leads. Otherwise a call to a leader that
// has disappeared would wait for its deadline. A call that must not be repeated waits nevertheless.
func (f *Forwarder) during(ctx context.Context, leader epoch, repeatable bool) (context.Context, context.CancelFunc) {
	if !repeatable {
		return context.WithCancel(ctx)
	}
	inner, cancel := context.WithCancelCause(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for changed := leader.changed; ; {
			select {
			case <-inner.Done():
				return
			case <-changed:
			}
			var now leadership.State
			if now, changed = f.config.Lead.State(); now.Leads || now.Address != "" && now.Address != leader.Address {
				cancel(errChanged)
				return
			}
		}
	}()
	return inner, func() { cancel(nil); <-ended }
}

// repeatable reports whether a call may be executed twice. Names and uids make every method idempotent but a create, which
// needs a request_id.
func repeatable(req any) bool {
	create, ok := req.(*sandboxv1.CreateSandboxRequest)
	return !ok || create.GetRequestId() != ""
}

// again reports whether a failed call should be repeated: it was not executed, or its outcome is unknown and a repetition is
// harmless.
func again(cause, err error, repeatable bool) bool {
	switch {
	case err == nil:
		return false
	case untouched(err):
		return true
	case !repeatable:
		return false
	case cause == errChanged: //nolint:errorlint // a context's cause, as it was set
		return true
	}
	// The error is the transport's and not the leader's, or the leader lost leadership during the call.
	return status.Code(err) == codes.Unavailable && reasonOf(err) == "" || reasonOf(err) == fault.NotLeader
}

// untouched reports whether a replica refused a call because it does not lead, and executed nothing of it.
func untouched(err error) bool {
	return reasonOf(err) == fault.NotLeader && !fault.IsUnsettled(rpc.FromStatus(err))
}

// reasonOf returns the reason in an error of one of our servers, or "".
func reasonOf(err error) fault.Reason {
	st, _ := status.FromError(err)
	for _, d := range st.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetDomain() == rpc.Domain {
			return fault.Reason(info.GetReason())
		}
	}
	return ""
}
