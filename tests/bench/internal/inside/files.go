package inside

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"time"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
)

const (
	// path of the file in the sandbox, and chunk the size of the pieces in which it is written and read.
	path  = "/tmp/bench"
	chunk = 256 << 10
	// transfers is how often each is measured; the best counts for both sides.
	transfers = 3
)

// transfers writes and reads a file, beside the same bytes through one gRPC stream with TLS.
func (s *suite) transfers(ctx context.Context) error {
	content := make([]byte, s.FileBytes)
	if _, err := rand.Read(content); err != nil {
		return fmt.Errorf("making the content: %w", err)
	}
	reference, err := startReference()
	if err != nil {
		return err
	}
	defer func() { _ = reference.close() }()
	ways := []struct {
		name, what string
		transfer   func(context.Context, []byte) error
	}{
		{"up", "one gRPC stream to the server, TLS", reference.up}, {"write", "WriteFile through the gateway", s.write},
		{"down", "one gRPC stream from the server, TLS", reference.down}, {"read", "ReadFile through the gateway", s.read},
	}
	best := map[string]float64{}
	for range transfers {
		for _, w := range ways {
			began := time.Now()
			if err := w.transfer(ctx, content); err != nil {
				return fmt.Errorf("measuring %s: %w", w.name, err)
			}
			best[w.name] = max(best[w.name], float64(s.FileBytes)/(1<<20)/time.Since(began).Seconds())
		}
	}
	for _, w := range ways {
		s.report.Value(w.name+"_mib_per_second", best[w.name], "MiB/s", fmt.Sprintf("%s, %d MiB in pieces of %d KiB, best of %d", w.what, s.FileBytes>>20, chunk>>10, transfers))
	}
	return nil
}

// write writes the file.
func (s *suite) write(ctx context.Context, content []byte) error {
	return send(ctx, s.files, content, mesh.Namespace, s.sandbox.GetName())
}

// read reads the file.
func (s *suite) read(ctx context.Context, content []byte) error {
	return receive(ctx, s.files, len(content), mesh.Namespace, s.sandbox.GetName())
}

// send writes the file of a sandbox.
func send(ctx context.Context, client filesystemv1.FilesystemServiceClient, content []byte, of ...string) error {
	stream, err := client.WriteFile(ctx)
	if err != nil {
		return err
	}
	first := &filesystemv1.WriteFileRequest{Header: &filesystemv1.WriteFileHeader{Path: path}}
	if len(of) == 2 {
		first.Namespace, first.Name = of[0], of[1]
	}
	err = stream.Send(first)
	for at := 0; at < len(content) && err == nil; at += chunk {
		err = stream.Send(&filesystemv1.WriteFileRequest{Data: content[at:min(at+chunk, len(content))]})
	}
	if err != nil && !errors.Is(err, io.EOF) { // the answer says why
		return err
	}
	resp, err := stream.CloseAndRecv()
	if err == nil && resp.GetWrittenBytes() != int64(len(content)) {
		err = fmt.Errorf("%d bytes were written", resp.GetWrittenBytes())
	}
	return err
}

// receive reads the file of a sandbox.
func receive(ctx context.Context, client filesystemv1.FilesystemServiceClient, want int, of ...string) error {
	in := &filesystemv1.ReadFileRequest{Path: path}
	if len(of) == 2 {
		in.Namespace, in.Name = of[0], of[1]
	}
	stream, err := client.ReadFile(ctx, in)
	if err != nil {
		return err
	}
	for n := 0; ; {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			if n != want {
				return fmt.Errorf("%d bytes were read", n)
			}
			return nil
		} else if err != nil {
			return err
		}
		n += len(m.GetData())
	}
}
