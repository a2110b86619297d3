package output

import (
	"fmt"
	"io"
	"os"
	"syscall"
)

// input is a client's FIFO, and the pipe or terminal from which the process reads. The process never has the FIFO itself, which is a file of
// the host.
type input struct {
	from, to *os.File
	// held keeps the FIFO open for writing, so that it has no end until CloseInput.
	held io.Closer
}

func (s *Streams) openInput(path string) (err error) {
	if path == "" {
		s.Files[0], err = os.Open(os.DevNull)
		return err
	}
	if err := s.openSource(path); err != nil {
		return fmt.Errorf("opening the input %s: %w", path, err)
	}
	s.Files[0], s.input.to, err = s.pipe(true)
	return err
}

// openSource opens where the input comes from. It never waits for a client.
func (s *Streams) openSource(path string) error {
	from, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	s.input.from = from
	s.ours = append(s.ours, from)
	if !isFIFO(path) {
		return nil
	}
	held, err := os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	s.input.held = held
	s.ours = append(s.ours, held)
	return nil
}

// feed begins to copy the input.
func (s *Streams) feed() {
	in := s.input
	if in.from == nil {
		return
	}
	s.feeding.Go(func() {
		_, _ = io.Copy(onlyWriter{in.to}, onlyReader{in.from}) // until the client or the process closes it
		_ = in.from.Close()
		if s.master == nil {
			_ = in.to.Close()
		}
	})
}

// onlyReader and onlyWriter hide what else a file can do: with splice(2) the goroutine would be in the kernel while it waits.
type (
	onlyReader struct{ io.Reader }
	onlyWriter struct{ io.Writer }
)

// CloseInput ends the input of the process, when the client has closed it as well.
func (s *Streams) CloseInput() {
	if s.input.held != nil {
		_ = s.input.held.Close()
	}
}
