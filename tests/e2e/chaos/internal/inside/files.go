package inside

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"slices"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	path = "/tmp/chaos"
	// chunk is the size of the pieces in which files are written.
	chunk = 32 << 10
)

// files replaces a file and reads it, until ctx ends or the sandbox does. A write without an answer may have been made.
func (u *user) files(ctx context.Context) Result {
	var r Result
	var current []byte
	var unsure [][]byte // writes since then that were not answered
	for ctx.Err() == nil {
		next := make([]byte, u.FileBytes)
		_, _ = rand.Read(next) // never fails
		err := u.write(ctx, next)
		switch {
		case err == nil:
			current, unsure = next, nil
			r.Writes++
		case ctx.Err() != nil:
			return r
		case over(err):
			return r // the process says whether the sandbox has ended
		default:
			unsure = append(unsure, next)
			u.wait(ctx)
			if current == nil {
				continue
			}
		}
		got, err := u.read(ctx)
		switch {
		case ctx.Err() != nil || over(err) && !u.runs(ctx):
			return r
		case over(err) && fault.ReasonOf(rpc.FromStatus(err)) != fault.FileNotFound && u.ends(ctx):
			return r
		case over(err):
			r.Broken = append(r.Broken, fmt.Sprintf("the file of %s cannot be read, though its container runs: %v", u.sandbox.GetName(), err))
			return r
		case err != nil:
			u.wait(ctx)
		case bytes.Equal(got, current), slices.ContainsFunc(unsure, func(b []byte) bool { return bytes.Equal(got, b) }):
			r.Reads++
		default:
			r.Broken = append(r.Broken, fmt.Sprintf("the file of %s has %d bytes that are not what was written last", u.sandbox.GetName(), len(got)))
			return r
		}
		u.wait(ctx)
	}
	return r
}

func (u *user) write(ctx context.Context, content []byte) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	stream, err := u.Files.WriteFile(ctx)
	if err != nil {
		return err
	}
	err = stream.Send(&filesystemv1.WriteFileRequest{Namespace: u.Namespace, Name: u.sandbox.GetName(), Header: &filesystemv1.WriteFileHeader{Path: path}})
	for at := 0; at < len(content) && err == nil; at += chunk {
		err = stream.Send(&filesystemv1.WriteFileRequest{Data: content[at:min(at+chunk, len(content))]})
	}
	if err != nil && !errors.Is(err, io.EOF) { // the answer says why
		return err
	}
	_, err = stream.CloseAndRecv()
	return err
}

func (u *user) read(ctx context.Context) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	stream, err := u.Files.ReadFile(ctx, &filesystemv1.ReadFileRequest{Namespace: u.Namespace, Name: u.sandbox.GetName(), Path: path})
	if err != nil {
		return nil, err
	}
	var got []byte
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return got, nil
		} else if err != nil {
			return nil, err
		}
		got = append(got, m.GetData()...)
	}
}
