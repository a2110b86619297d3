// Package host manages the machine itself: processes, pid files, mounts, cgroups, packages, files. It
// knows nothing about Kubernetes.
//
// Everything here expects leftovers of interrupted runs: a process is identified by its pid and its start time, so that a pid
// that the kernel has reused is never trusted or signaled; removing what does not exist is success.
package host

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"
)

// Run executes a command to its end and returns its standard output. The error carries the command and what it wrote
// to standard error.
func Run(ctx context.Context, name string, args ...string) (string, error) {
	return RunInput(ctx, "", name, args...)
}

// RunInput is Run with a text on the command's standard input.
func RunInput(ctx context.Context, input, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var stdout, stderr strings.Builder
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("running %s %s: %w: %s", name, strings.Join(args, " "), err,
			strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// Poll calls try every interval until it returns nil or a Permanent error, or until ctx ends; then the error holds the last
// one of try's too.
func Poll(ctx context.Context, interval time.Duration, try func(context.Context) error) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		err := try(ctx)
		var final *permanent
		switch {
		case err == nil:
			return nil
		case errors.As(err, &final):
			return final.error
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-ticker.C:
		}
	}
}

// permanent is an error that no further attempt cures.
type permanent struct{ error }

// Permanent marks an error, returned to Poll, as one that no further attempt cures.
func Permanent(err error) error { return &permanent{err} }
