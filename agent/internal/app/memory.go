package app

import (
	"context"
	"runtime/debug"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// defaultMemoryBytes bounds the agent's own memory.
const defaultMemoryBytes = 512 << 20

// memoryLimiter is the part of the runtime that bounds the agent's own memory.
type memoryLimiter interface {
	LimitOwnMemory(ctx context.Context, bytes int64) (int64, error)
}

// limitMemory bounds the agent's own memory, so that a leak, or a caller that finds a way to make it take memory, ends this process and
// not its node: sandboxes run on, and the next process adopts them. The garbage collector works harder before that.
func (c *Config) limitMemory(ctx context.Context, l memoryLimiter) {
	if c.MemoryBytes == 0 {
		return
	}
	log := logr.FromContextOrDiscard(ctx)
	bytes, err := l.LimitOwnMemory(ctx, c.MemoryBytes)
	switch {
	case errdefs.IsNotFound(err):
		log.V(2).Info("the agent's memory is not limited: it runs in no container of its Pod", obs.KeyError, err.Error())
	case err != nil:
		log.Error(err, "limiting the agent's memory")
	default:
		debug.SetMemoryLimit(bytes / 10 * 9)
	}
}
