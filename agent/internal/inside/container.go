package inside

import (
	"context"
	"syscall"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// Container is what a runtime knows of the container of a sandbox, and does for it. Every method may be called concurrently.
type Container interface {
	// Join starts a supervisor that listens at the sandbox's socket, where none does. It returns a fault if there can be none. Calls at the same time
	// share one start.
	Join(ctx context.Context) error
	// Paused reports whether no process of the container gets any processor time because it was paused. In doubt it does not.
	Paused(ctx context.Context) bool
	// SignalMain sends a signal to the sandbox's own process if that is the runtime's to do. If handled is false, it is the supervisor's.
	SignalMain(ctx context.Context, r *wire.Request) (handled bool, err error)
}

// isMain reports whether a target is the sandbox's own process, which is pid 1 wherever a supervisor has joined.
func isMain(t wire.Target) bool { return t.Tag == wire.MainTag || t.Tag == "" && t.Pid == 1 }

// signalMain signals the sandbox's own process if the runtime does that.
func (s Sandbox) signalMain(ctx context.Context, kind wire.Type, r *wire.Request) (handled bool, err error) {
	if s.Container == nil || kind != wire.TypeSignal || !isMain(r.Target) {
		return false, nil
	}
	if r.Signal > uint32(maxSignal) {
		return true, &wire.Failure{Stage: wire.StageProcess, Errno: syscall.EINVAL, Detail: "(signaling)"}
	}
	return s.Container.SignalMain(ctx, r)
}

// maxSignal is the last signal of Linux.
const maxSignal = syscall.Signal(64)
