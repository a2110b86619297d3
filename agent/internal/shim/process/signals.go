package process

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// action is the kernel's struct sigaction.
type action struct {
	handler  uintptr
	flags    uint64
	restorer uintptr
	mask     uint64
}

const (
	lastSignal = 64
	maskSize   = 8 // bytes of a mask of signals

	defaultHandler uintptr = 0
	ignoreHandler  uintptr = 1
)

// stopIgnoring restores the default action of each signal that this program ignores. A program inherits ignored signals from its parent, and
// the Go runtime changes nothing about the signals that it does not use.
func stopIgnoring() error {
	for n := unix.Signal(1); n <= lastSignal; n++ {
		if n == unix.SIGKILL || n == unix.SIGSTOP {
			continue
		}
		a, err := changeAction(n, nil)
		if err == nil && a.handler == ignoreHandler {
			_, err = changeAction(n, &action{handler: defaultHandler})
		}
		if err != nil {
			return fmt.Errorf("the action of signal %d: %w", n, err)
		}
	}
	return nil
}

// changeAction returns the action of a signal, and sets it if next is not nil. libc refuses two of them, and the unix package has no such call.
func changeAction(n unix.Signal, next *action) (action, error) {
	var last action
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(n), uintptr(unsafe.Pointer(next)), uintptr(unsafe.Pointer(&last)), maskSize, 0, 0) //nolint:gosec // rt_sigaction(2) takes these two
	runtime.KeepAlive(next)
	if errno != 0 {
		return action{}, errno
	}
	return last, nil
}
