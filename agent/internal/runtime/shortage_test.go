package runtime_test

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func TestShortage(t *testing.T) {
	for name, test := range map[string]struct {
		err  error
		says string
	}{
		"disk":                {&os.PathError{Op: "mkdir", Path: "/x", Err: syscall.ENOSPC}, "free disk space"},
		"disk of containerd":  {status.Error(codes.Unknown, "write /x: no space left on device"), "free disk space"},
		"files of a process":  {fmt.Errorf("opening: %w", syscall.EMFILE), "RLIMIT_NOFILE"},
		"files of the node":   {fmt.Errorf("opening: %w", syscall.ENFILE), "fs.file-max"},
		"memory":              {syscall.ENOMEM, "free memory"},
		"cgroups, processes":  {errors.Join(errors.New("starting"), syscall.EAGAIN), "pids.max"},
		"quota":               {syscall.EDQUOT, "quota"},
		"something else":      {syscall.EPERM, ""},
		"the request's fault": {fault.Wrap(syscall.ENOMEM, errdefs.ErrFailedPrecondition, fault.CommandNotExecutable, "no"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			err := runtime.Shortage(test.err)
			require.ErrorIs(t, err, test.err)
			if test.says == "" {
				require.Equal(t, test.err, err)
				return
			}
			require.True(t, errdefs.IsResourceExhausted(err))
			require.Equal(t, fault.NoCapacity, fault.ReasonOf(err))
			require.ErrorContains(t, err, test.says)
		})
	}
	require.NoError(t, runtime.Shortage(nil))
}
