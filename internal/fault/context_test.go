package fault_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func TestFromContext(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithDeadline(t.Context(), time.Unix(1, 0))
	defer cancel()
	last := errors.New("refused")
	tests := map[string]struct {
		ctx    context.Context //nolint:containedctx // the input of a test case
		last   error
		class  error
		reason fault.Reason
		want   string
	}{
		"canceled":        {canceled, nil, context.Canceled, fault.Cancelled, "the caller left while waiting"},
		"deadline":        {late, nil, context.DeadlineExceeded, fault.DeadlineExceeded, "the deadline passed while waiting"},
		"with last error": {late, last, context.DeadlineExceeded, fault.DeadlineExceeded, "the deadline passed while waiting (last: refused)"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := fault.FromContext(test.ctx, "waiting", test.last)
			require.ErrorIs(t, err, test.class)
			require.Equal(t, test.reason, fault.ReasonOf(err))
			require.Equal(t, test.want, err.Message())
			if test.last != nil {
				require.ErrorIs(t, err, test.last)
			}
		})
	}
}
