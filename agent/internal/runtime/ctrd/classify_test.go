package ctrd

import (
	"context"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func TestClassify(t *testing.T) {
	tests := map[string]struct {
		err    error
		want   error
		reason fault.Reason
	}{
		"the deadline passed here":                 {context.DeadlineExceeded, context.DeadlineExceeded, ""},
		"the deadline passed in containerd":        {status.Error(codes.DeadlineExceeded, "late"), context.DeadlineExceeded, ""},
		"the deadline passed in containerd's shim": {status.Error(codes.Unknown, "context deadline exceeded"), context.DeadlineExceeded, ""},
		"canceled here":                            {context.Canceled, context.Canceled, ""},
		"canceled in containerd":                   {status.Error(codes.Canceled, "gone"), context.Canceled, ""},
		"canceled in containerd's shim":            {status.Error(codes.Unknown, "waiting: context canceled"), context.Canceled, ""},
		"no containerd":                            {status.Error(codes.Unavailable, "connection refused"), errdefs.ErrUnavailable, fault.RuntimeUnavailable},
		"not found":                                {status.Error(codes.NotFound, "task: not found"), errdefs.ErrNotFound, ""},
		"unknown":                                  {status.Error(codes.Unknown, "no space left on device"), errdefs.ErrUnknown, ""},
		"a fault":                                  {fault.New(errdefs.ErrNotFound, fault.ImageNotFound, "no"), errdefs.ErrNotFound, fault.ImageNotFound},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := classify(test.err, "waiting for container %s", "c")
			require.ErrorIs(t, err, test.want)
			if test.reason != "" {
				require.Equal(t, test.reason, fault.ReasonOf(err), "%v", err)
			}
		})
	}
	require.NoError(t, classify(nil, "waiting"))
}
