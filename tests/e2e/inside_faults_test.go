//go:build e2e

package e2e_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	tunnelv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/tunnel/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

// box is a sandbox that calls go into.
type box struct {
	name      string
	processes processv1.ProcessServiceClient
	files     filesystemv1.FilesystemServiceClient
	tunnels   tunnelv1.TunnelServiceClient
}

func newBox(t *testing.T, name string) box {
	t.Helper()
	create(t, sandboxes(t), kept(name))
	conn := cluster.Dial(t)
	return box{name, processv1.NewProcessServiceClient(conn), filesystemv1.NewFilesystemServiceClient(conn), tunnelv1.NewTunnelServiceClient(conn)}
}

func (b box) run(ctx context.Context, limit int64, args ...string) (*processv1.RunProcessResponse, error) {
	return b.processes.RunProcess(ctx, &processv1.RunProcessRequest{
		Namespace: cluster.Namespace, Name: b.name, Process: &processv1.ProcessSpec{Args: args}, MaxOutputBytes: limit,
	})
}

// start starts a process with input and a tag, and returns its stream once it runs.
func (b box) start(ctx context.Context, tag string, args ...string) (processv1.ProcessService_StartProcessClient, error) {
	s, err := b.processes.StartProcess(ctx, &processv1.StartProcessRequest{
		Namespace: cluster.Namespace, Name: b.name, Stdin: true, Process: &processv1.ProcessSpec{Args: args, Tag: tag},
	})
	if err == nil {
		_, err = s.Recv()
	}
	return s, err
}

// drain receives until the end of a stream.
func drain[T any](recv func() (T, error)) error {
	for {
		if _, err := recv(); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// fill sends until a stream ends.
func fill(send func() error, end func() error) error {
	for {
		if err := send(); err != nil {
			return end() // which has the reason
		}
	}
}

// calls are all that go on for a while. Each says when it has begun, and waits for deleted before it takes what is left of its stream.
func (b box) calls(ctx context.Context, deleted <-chan struct{}) map[string]func(began func()) error {
	tagged := &processv1.ProcessSelector{By: &processv1.ProcessSelector_Tag{Tag: "cat"}}
	piece := make([]byte, 64<<10)
	return map[string]func(began func()) error{
		"RunProcess": func(began func()) error {
			began()
			_, err := b.run(ctx, 0, "sleep", "1000")
			return err
		},
		"StartProcess": func(began func()) error {
			s, err := b.start(ctx, "", "sleep", "1000")
			began()
			if err != nil {
				return err
			}
			return drain(s.Recv)
		},
		"ConnectProcess": func(began func()) error {
			s, err := b.processes.ConnectProcess(ctx, &processv1.ConnectProcessRequest{Namespace: cluster.Namespace, Name: b.name, Process: tagged})
			began()
			if err != nil {
				return err
			}
			return drain(s.Recv)
		},
		"StreamInput": func(began func()) error {
			s, err := b.processes.StreamInput(ctx)
			began()
			if err != nil {
				return err
			}
			return fill(func() error {
				return s.Send(&processv1.StreamInputRequest{Namespace: cluster.Namespace, Name: b.name, Process: tagged, Data: piece})
			}, func() error { _, err := s.CloseAndRecv(); return err })
		},
		"ReadFile": func(began func()) error {
			s, err := b.files.ReadFile(ctx, &filesystemv1.ReadFileRequest{Namespace: cluster.Namespace, Name: b.name, Path: "/tmp/large/file"})
			if err == nil {
				_, err = s.Recv()
			}
			began()
			<-deleted
			if err != nil {
				return err
			}
			return drain(s.Recv)
		},
		"WriteFile": func(began func()) error {
			s, err := b.files.WriteFile(ctx)
			if err == nil {
				err = s.Send(&filesystemv1.WriteFileRequest{Namespace: cluster.Namespace, Name: b.name, Header: &filesystemv1.WriteFileHeader{Path: "/tmp/new"}})
			}
			began()
			<-deleted
			if err != nil {
				return err
			}
			return fill(func() error { return s.Send(&filesystemv1.WriteFileRequest{Data: piece}) }, func() error { _, err := s.CloseAndRecv(); return err })
		},
		"WatchDirectory": func(began func()) error {
			s, err := b.files.WatchDirectory(ctx, &filesystemv1.WatchDirectoryRequest{Namespace: cluster.Namespace, Name: b.name, Path: "/tmp"})
			if err == nil {
				_, err = s.Recv()
			}
			began()
			if err != nil {
				return err
			}
			return drain(s.Recv)
		},
		"ReadArchive": func(began func()) error {
			s, err := b.files.ReadArchive(ctx, &filesystemv1.ReadArchiveRequest{Namespace: cluster.Namespace, Name: b.name, Path: "/tmp/large"})
			if err == nil {
				_, err = s.Recv()
			}
			began()
			<-deleted
			if err != nil {
				return err
			}
			return drain(s.Recv)
		},
		"Tunnel": func(began func()) error {
			s, err := b.tunnels.Tunnel(ctx)
			if err == nil {
				err = s.Send(&tunnelv1.TunnelRequest{Namespace: cluster.Namespace, Name: b.name})
			}
			if err == nil {
				open := &tunnelv1.Frame_Open{Port: 8395}
				err = s.Send(&tunnelv1.TunnelRequest{Frame: &tunnelv1.Frame{Connection: 1, Event: &tunnelv1.Frame_Open_{Open: open}}})
			}
			if err == nil {
				_, err = s.Recv() // that nothing listens there
			}
			began()
			if err != nil {
				return err
			}
			return drain(s.Recv)
		},
	}
}

// TestCallsEndWithTheSandbox deletes a sandbox during each kind of call: each ends soon, with a reason or, if it had nothing more to say, without an error.
func TestCallsEndWithTheSandbox(t *testing.T) {
	b := newBox(t, uniqueName("deleted"))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err := b.run(ctx, 0, "sh", "-c", "mkdir /tmp/large && head -c 67108864 /dev/zero > /tmp/large/file")
	require.NoError(t, err)
	_, err = b.start(ctx, "cat", "sh", "-c", "exec sleep 1000")
	require.NoError(t, err)
	deleted := make(chan struct{})
	calls := b.calls(ctx, deleted)
	var begun, ended sync.WaitGroup
	var mu sync.Mutex
	results := map[string]error{}
	for name, call := range calls {
		begun.Add(1)
		ended.Go(func() {
			err := call(begun.Done)
			mu.Lock()
			defer mu.Unlock()
			results[name] = err
		})
	}
	begun.Wait()
	_, err = sandboxes(t).DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: cluster.Namespace, Name: b.name, GracePeriod: durationpb.New(0)})
	require.NoError(t, err)
	close(deleted)
	done := make(chan struct{})
	go func() { ended.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		mu.Lock()
		defer mu.Unlock()
		require.Len(t, results, len(calls), "some calls do not end: these have: %v", results)
	}
	for name, err := range results {
		if err == nil {
			require.Contains(t, []string{"StartProcess", "ConnectProcess", "ReadFile", "ReadArchive"}, name, "it cannot have finished")
			continue
		}
		require.Contains(t, []codes.Code{codes.Unavailable, codes.FailedPrecondition, codes.NotFound, codes.Aborted}, status.Code(err), "%s: %v", name, err)
		require.NotContains(t, []fault.Reason{"", fault.Internal}, fault.ReasonOf(rpc.FromStatus(err)), "%s: %v", name, err)
	}
	_, err = b.run(ctx, 0, "true")
	require.NotContains(t, []fault.Reason{"", fault.Internal}, fault.ReasonOf(rpc.FromStatus(err)), "a call after it: %v", err)
}

// TestMuchOutput: what exceeds the limit of a call is counted, and a process whose client never reads waits, while others run.
func TestMuchOutput(t *testing.T) {
	b := newBox(t, uniqueName("output"))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	out, err := b.run(ctx, 4096, "head", "-c", "1073741824", "/dev/zero")
	require.NoError(t, err)
	require.Zero(t, out.GetExit().GetCode())
	require.Len(t, out.GetStdout(), 4096)
	require.EqualValues(t, 1<<30-4096, out.GetStdoutDroppedBytes())

	_, err = b.start(ctx, "yes", "yes") // its stream is never read
	require.NoError(t, err)
	written := func() int64 {
		resp, err := b.processes.ListProcesses(ctx, &processv1.ListProcessesRequest{Namespace: cluster.Namespace, Name: b.name})
		require.NoError(t, err)
		for _, p := range resp.GetProcesses() {
			if p.GetTag() == "yes" {
				return p.GetEndOffset()
			}
		}
		return 0
	}
	last := int64(-1)
	require.True(t, eventually(settle, func() bool {
		before := last
		last = written()
		return last > 0 && last == before
	}), "the process does not wait")
	require.Less(t, last, int64(64<<20), "it waits when what is on the way is full")
	for range 20 {
		out, err := b.run(ctx, 0, "echo", "others run")
		require.NoError(t, err)
		require.Equal(t, "others run\n", string(out.GetStdout()))
	}
	require.Equal(t, last, written())
}

// TestCommandsThatAreTooLarge are refused with a reason, by whichever server finds out.
func TestCommandsThatAreTooLarge(t *testing.T) {
	b := newBox(t, uniqueName("large"))
	many := make([]string, 0, 2000)
	for range cap(many) {
		many = append(many, strings.Repeat("x", 2<<10))
	}
	for name, args := range map[string][]string{
		"one of 2 MiB": {"true", strings.Repeat("x", 2<<20)}, "4 MiB together": append([]string{"true"}, many...), "none": {}, "not UTF-8": {"true", "\xff"},
		"a zero byte": {"true", "a\x00b"},
	} {
		_, err := b.run(t.Context(), 0, args...)
		require.Error(t, err, name)
		if name != "not UTF-8" { // the client cannot encode it
			require.NotContains(t, []fault.Reason{"", fault.Internal}, fault.ReasonOf(rpc.FromStatus(err)), "%s: %v", name, err)
		}
	}
	_, err := b.run(t.Context(), 0, "true")
	require.NoError(t, err)
}
