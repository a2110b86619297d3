package fault

import (
	"context"
	"errors"
	"fmt"
)

// FromContext returns the error of a call whose context ended while it was doing something, with the last error that it met
// before; last may be nil.
func FromContext(ctx context.Context, doing string, last error) *Error {
	after := ""
	if last != nil {
		after = fmt.Sprintf(" (last: %v)", last)
	}
	if errors.Is(ctx.Err(), context.Canceled) || errors.Is(context.Cause(ctx), context.Canceled) {
		return Wrap(last, context.Canceled, Cancelled, "the caller left while %s%s", doing, after)
	}
	return Wrap(last, context.DeadlineExceeded, DeadlineExceeded, "the deadline passed while %s%s", doing, after)
}
