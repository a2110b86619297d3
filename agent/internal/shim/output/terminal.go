package output

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"
)

// OpenTerminal opens the streams of a process with a terminal: stdin is typed, and what it prints goes to stdout. Files are /dev/null. Attach
// begins the copies. The caller calls Close in any case.
func OpenTerminal(stdin, stdout string) (s *Streams, err error) {
	s = &Streams{}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	for i := range s.Files {
		if s.Files[i], err = os.OpenFile(os.DevNull, os.O_RDWR, 0); err != nil {
			return s, err
		}
	}
	if stdin != "" {
		if err := s.openSource(stdin); err != nil {
			return s, fmt.Errorf("opening the input %s: %w", stdin, err)
		}
	}
	if stdout == "" {
		stdout = os.DevNull
	}
	if err := s.openTarget(0, stdout); err != nil {
		return s, fmt.Errorf("opening the output %s: %w", stdout, err)
	}
	return s, nil
}

// Attach begins the copies to and from the master of the process's terminal, which is the Streams' from now on.
func (s *Streams) Attach(master *os.File) {
	for _, f := range s.Files {
		_ = f.Close()
	}
	s.ours = append(s.ours, master)
	s.master, s.input.to, s.targets[0].pipe = master, master, master
	s.feed()
	limit := rate.NewLimiter(Rate, Burst)
	s.copies.Go(func() { s.copy(s.targets[0], limit) })
}

// Resize sets the size of the terminal, in characters. Without a terminal it has no effect.
func (s *Streams) Resize(rows, columns uint16) error {
	if s.master == nil {
		return nil
	}
	conn, err := s.master.SyscallConn()
	if err != nil {
		return err
	}
	var sizeErr error
	err = conn.Control(func(fd uintptr) {
		sizeErr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns})
	})
	if err != nil {
		return err
	}
	return sizeErr
}
