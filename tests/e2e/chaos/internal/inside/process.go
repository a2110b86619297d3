package inside

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/google/uuid"

	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// follower reads the output of one process over several connections.
type follower struct {
	tag    string
	known  bool // the mesh has said that it runs
	output strings.Builder
	exit   *processv1.ProcessExit
	gap    string
}

// process runs one process to its end. It reports whether the sandbox is still there.
func (u *user) process(ctx context.Context) (alive bool) {
	f := &follower{tag: "p-" + uuid.NewString()[:8]}
	for ctx.Err() == nil && f.exit == nil {
		err := u.follow(ctx, f)
		u.result.Connections++
		switch {
		case f.gap != "":
			u.broken("process %s of %s: %s", f.tag, u.sandbox.GetName(), f.gap)
			return true
		case f.exit != nil || ctx.Err() != nil:
		case over(err):
			if !u.runs(ctx) {
				return false
			}
			if f.known && fault.ReasonOf(rpc.FromStatus(err)) == fault.ProcessNotFound {
				u.broken("process %s of %s is unknown, though its container runs", f.tag, u.sandbox.GetName())
				return true
			}
			u.wait(ctx) // those that say so may not know yet
		default:
			u.wait(ctx)
		}
	}
	if f.exit == nil {
		return true
	}
	var want strings.Builder
	for i := range u.Lines {
		fmt.Fprintf(&want, "line %d\n", i)
	}
	switch {
	case f.exit.GetCode() != 0 && !u.runs(ctx):
		return false // it was killed with its sandbox
	case f.exit.GetCode() != 0:
		u.broken("process %s of %s exited with %d", f.tag, u.sandbox.GetName(), f.exit.GetCode())
	case f.output.String() != want.String():
		u.broken("process %s of %s wrote %d bytes and not the %d expected", f.tag, u.sandbox.GetName(), f.output.Len(), want.Len())
	default:
		u.result.Processes++
		u.result.Bytes += f.output.Len()
	}
	return true
}

// follow starts the process, or connects to it, and reads until that ends.
func (u *user) follow(ctx context.Context, f *follower) error {
	if f.known {
		stream, err := u.Processes.ConnectProcess(ctx, &processv1.ConnectProcessRequest{
			Namespace: u.Namespace, Name: u.sandbox.GetName(), FromOffset: int64(f.output.Len()),
			Process: &processv1.ProcessSelector{By: &processv1.ProcessSelector_Tag{Tag: f.tag}},
		})
		if err != nil {
			return err
		}
		return read(f, stream.Recv)
	}
	script := fmt.Sprintf("i=0; while [ $i -lt %d ]; do echo line $i; i=$((i+1)); sleep %.3f; done", u.Lines, u.Every.Seconds())
	stream, err := u.Processes.StartProcess(ctx, &processv1.StartProcessRequest{
		Namespace: u.Namespace, Name: u.sandbox.GetName(), Process: &processv1.ProcessSpec{Args: []string{"sh", "-c", script}, Tag: f.tag},
	})
	if err == nil {
		err = read(f, stream.Recv)
	}
	if fault.ReasonOf(rpc.FromStatus(err)) == fault.ProcessExists {
		f.known = true // a start whose answer was lost
	}
	return err
}

// read reads the events of one connection.
func read[M interface {
	GetEvent() *processv1.ProcessEvent
}](f *follower, next func() (M, error)) error {
	for {
		m, err := next()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		switch e := m.GetEvent(); {
		case e.GetStarted() != nil:
			f.known = true
		case e.GetOutput() != nil:
			if at := e.GetOutput().GetOffset(); at != int64(f.output.Len()) {
				f.gap = fmt.Sprintf("its output continues at %d after %d bytes", at, f.output.Len())
				return nil
			}
			f.output.Write(e.GetOutput().GetData())
		case e.GetEnded() != nil:
			f.exit = e.GetEnded()
		}
	}
}
