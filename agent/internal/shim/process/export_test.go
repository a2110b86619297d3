package process

import (
	"os"

	"golang.org/x/sys/unix"
)

// Ignore makes this program ignore a signal.
func Ignore(n unix.Signal) error {
	_, err := changeAction(n, &action{handler: ignoreHandler})
	return err
}

// Of returns a process that this program has not started; its end is not reported.
func Of(pid int) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, err
	}
	return &Process{pid: pid, fd: os.NewFile(uintptr(fd), "pidfd"), done: make(chan struct{})}, nil
}
