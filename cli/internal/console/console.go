// Package console is the user's terminal: raw mode, size, and the keys that detach from a process. A Console is for one session; Restore may be
// called by any goroutine, any number of times.
package console

import (
	"errors"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/term"
)

// Console is a terminal in raw mode.
type Console struct {
	in, out *os.File
	restore func()
}

// Is reports whether a stream is a terminal.
func Is(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// Open switches a terminal to raw mode: every key is passed on, also those that would make signals.
func Open(in io.Reader, out io.Writer) (*Console, error) {
	c := &Console{}
	c.in, _ = in.(*os.File)
	c.out, _ = out.(*os.File)
	before, err := term.MakeRaw(int(c.in.Fd()))
	if err != nil {
		return nil, err
	}
	c.restore = sync.OnceFunc(func() { _ = term.Restore(int(c.in.Fd()), before) })
	return c, nil
}

// Restore ends raw mode.
func (c *Console) Restore() { c.restore() }

// Size returns the size in characters; zero if it is not known.
func Size(out any) (rows, columns int) {
	f, ok := out.(*os.File)
	if !ok {
		return 0, 0
	}
	columns, rows, err := term.GetSize(int(f.Fd()))
	if err != nil {
		return 0, 0
	}
	return rows, columns
}

// Resized returns a channel that receives after each change of the size, until stop is called.
func Resized() (changed <-chan os.Signal, stop func()) {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGWINCH)
	return c, func() { signal.Stop(c) }
}

// The keys that detach.
const (
	ctrlP = 16
	ctrlQ = 17
)

// Detacher passes input on until the user types Ctrl-P Ctrl-Q. A Ctrl-P that something else follows is passed on with it.
type Detacher struct {
	r       io.Reader
	pending bool
	over    []byte
}

// NewDetacher returns a reader of r.
func NewDetacher(r io.Reader) *Detacher { return &Detacher{r: r} }

// Read implements io.Reader. The error is ErrDetached after the keys.
func (d *Detacher) Read(b []byte) (int, error) {
	if len(d.over) > 0 {
		n := copy(b, d.over)
		d.over = d.over[n:]
		return n, nil
	}
	buffer := make([]byte, max(len(b)-1, 1))
	for {
		n, err := d.r.Read(buffer)
		out := make([]byte, 0, n+1)
		for _, key := range buffer[:n] {
			switch {
			case d.pending && key == ctrlQ:
				return copy(b, out), ErrDetached
			case d.pending:
				d.pending = false
				out = append(out, ctrlP)
			}
			if key == ctrlP {
				d.pending = true
				continue
			}
			out = append(out, key)
		}
		if len(out) == 0 && err == nil {
			continue // a Ctrl-P waits for the next key
		}
		if err != nil && d.pending {
			d.pending = false
			out = append(out, ctrlP)
		}
		m := copy(b, out)
		d.over = out[m:]
		if len(d.over) > 0 {
			err = nil
		}
		return m, err
	}
}

// ErrDetached means that the user has typed the keys that detach.
var ErrDetached = errors.New("detached")
