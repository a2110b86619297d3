package rpc

import (
	"context"
	"errors"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Domain is the domain of every ErrorInfo.
const Domain = "fast-sandbox.io"

// defaultRetry is the RetryInfo delay of an Unavailable or ResourceExhausted error that sets none.
const defaultRetry = time.Second

// classes maps error classes to codes. The first match wins.
var classes = []struct {
	class  error
	code   codes.Code
	reason fault.Reason // of errors that are not a *fault.Error
}{
	{context.DeadlineExceeded, codes.DeadlineExceeded, fault.DeadlineExceeded},
	{context.Canceled, codes.Canceled, fault.Cancelled},
	{errdefs.ErrInvalidArgument, codes.InvalidArgument, fault.InvalidField},
	{errdefs.ErrNotFound, codes.NotFound, fault.Internal},
	{errdefs.ErrAlreadyExists, codes.AlreadyExists, fault.Internal},
	{errdefs.ErrPermissionDenied, codes.PermissionDenied, fault.PermissionDenied},
	{errdefs.ErrUnauthenticated, codes.Unauthenticated, fault.PermissionDenied},
	{errdefs.ErrResourceExhausted, codes.ResourceExhausted, fault.Overloaded},
	{errdefs.ErrFailedPrecondition, codes.FailedPrecondition, fault.PhaseConflict},
	{errdefs.ErrAborted, codes.Aborted, fault.SandboxTerminating},
	{errdefs.ErrUnavailable, codes.Unavailable, fault.AgentUnavailable},
	{errdefs.ErrNotImplemented, codes.Unimplemented, fault.Internal},
}

// ToStatus converts an error to a status error with ErrorInfo, and with RetryInfo where a retry makes sense. An error
// without a class becomes Internal with a fixed message, so that no internal detail reaches a client; the server logs it. A
// status error is returned unchanged.
func ToStatus(err error) error {
	if err == nil {
		return nil
	}
	var f *fault.Error
	isFault := errors.As(err, &f)
	if _, ok := status.FromError(err); ok && !isFault {
		return err
	}
	code, reason := classify(err)
	message := "internal error"
	var metadata map[string]string
	var violations []fault.Violation
	switch {
	case isFault:
		message, reason, metadata, violations = f.Message(), f.Reason(), f.Metadata(), f.Violations()
	case code != codes.Internal:
		message = err.Error()
	}
	details := []protoadapt.MessageV1{&errdetails.ErrorInfo{Reason: string(reason), Domain: Domain, Metadata: metadata}}
	if len(violations) > 0 {
		bad := &errdetails.BadRequest{}
		for _, v := range violations {
			bad.FieldViolations = append(bad.FieldViolations, &errdetails.BadRequest_FieldViolation{
				Field: v.Field, Description: v.Message, Reason: string(reason),
			})
		}
		details = append(details, bad)
	}
	if code == codes.Unavailable || code == codes.ResourceExhausted {
		retry, ok := fault.RetryAfter(err)
		if !ok {
			retry = defaultRetry
		}
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(retry)})
	}
	st, detailErr := status.New(code, message).WithDetails(details...)
	if detailErr != nil { // the details above always marshal
		return status.Error(code, message)
	}
	return st.Err()
}

func classify(err error) (codes.Code, fault.Reason) {
	var f *fault.Error
	if errors.As(err, &f) {
		// The class of the fault itself takes precedence over those of its causes.
		err = f.Class()
	}
	for _, c := range classes {
		if errors.Is(err, c.class) {
			return c.code, c.reason
		}
	}
	return codes.Internal, fault.Internal
}

// FromStatus converts a received status error to a *fault.Error with the same class, reason, message, metadata, violations and
// retry delay. Any other error, nil included, is returned unchanged.
func FromStatus(err error) error {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok || st.Code() == codes.OK {
		return err
	}
	class, reason := error(errdefs.ErrInternal), fault.Internal
	if st.Code() == codes.Unauthenticated {
		class, reason = errdefs.ErrUnauthenticated, fault.PermissionDenied
	}
	for _, c := range classes {
		if c.code == st.Code() {
			class, reason = c.class, c.reason
			break
		}
	}
	var info *errdetails.ErrorInfo
	var retry *errdetails.RetryInfo
	var violations []fault.Violation
	for _, d := range st.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			info = d
		case *errdetails.RetryInfo:
			retry = d
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				violations = append(violations, fault.Violation{Field: v.GetField(), Message: v.GetDescription()})
			}
		}
	}
	if info != nil && info.GetDomain() == Domain {
		reason = fault.Reason(info.GetReason())
	}
	f := fault.New(class, reason, "%s", st.Message()).WithViolations(violations...)
	if info != nil && info.GetDomain() == Domain {
		for k, v := range info.GetMetadata() {
			f = f.With(k, v)
		}
	}
	if retry != nil {
		f = f.RetryIn(retry.GetRetryDelay().AsDuration())
	}
	return f
}
