//go:build e2e

package e2e_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

// kept returns a create of a sandbox without a process of its own.
func kept(name string) *sandboxv1.CreateSandboxRequest {
	r := sleeper(name)
	r.Spec.Command, r.Spec.KeepAlive = nil, true
	return r
}

// follower reads the output of a process, and connects again wherever that ends before the process does.
type follower struct {
	client processv1.ProcessServiceClient
	name   string

	pid    int32
	output bytes.Buffer
	exit   *processv1.ProcessExit
	broken int // connections
}

// events is what StartProcess and ConnectProcess return.
type events func() (*processv1.ProcessEvent, error)

func (f *follower) start(ctx context.Context, args ...string) error {
	stream, err := f.client.StartProcess(ctx, &processv1.StartProcessRequest{
		Namespace: cluster.Namespace, Name: f.name, Process: &processv1.ProcessSpec{Args: args},
	})
	if err != nil {
		return err
	}
	err = f.read(func() (*processv1.ProcessEvent, error) { m, err := stream.Recv(); return m.GetEvent(), err })
	if f.pid == 0 {
		return fmt.Errorf("starting a process: %w", err)
	}
	for ctx.Err() == nil && f.exit == nil {
		f.broken++
		err = f.connect(ctx)
	}
	return err
}

func (f *follower) connect(ctx context.Context) error {
	stream, err := f.client.ConnectProcess(ctx, &processv1.ConnectProcessRequest{
		Namespace: cluster.Namespace, Name: f.name, FromOffset: int64(f.output.Len()),
		Process: &processv1.ProcessSelector{By: &processv1.ProcessSelector_Pid{Pid: f.pid}},
	})
	if err == nil {
		err = f.read(func() (*processv1.ProcessEvent, error) { m, err := stream.Recv(); return m.GetEvent(), err })
	}
	if code := status.Code(err); code == codes.NotFound || code == codes.InvalidArgument {
		return fmt.Errorf("connecting to process %d: %w", f.pid, err)
	}
	if f.exit == nil {
		select {
		case <-time.After(tick):
		case <-ctx.Done():
		}
	}
	return err
}

// read reads a stream to its end.
func (f *follower) read(next events) error {
	for {
		e, err := next()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case e.GetStarted() != nil:
			f.pid = e.GetStarted().GetPid()
		case e.GetOutput() != nil:
			if e.GetOutput().GetOffset() != int64(f.output.Len()) {
				return status.Errorf(codes.InvalidArgument, "output continues at %d after %d bytes", e.GetOutput().GetOffset(), f.output.Len())
			}
			f.output.Write(e.GetOutput().GetData())
		case e.GetEnded() != nil:
			f.exit = e.GetEnded()
		}
	}
}

// TestProcessesOutliveTheMesh kills agents, gateways and allocators while 50 processes of a sandbox write: each runs to its end, and its client,
// which connects again, has every byte of its output once.
func TestProcessesOutliveTheMesh(t *testing.T) {
	const processes, lines = 50, 120
	name := uniqueName("streams")
	create(t, sandboxes(t), kept(name))
	customResource(t, name, running) // that an allocator reads when it starts
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	var want bytes.Buffer
	for i := range lines {
		fmt.Fprintf(&want, "%d\n", i)
	}
	client := processv1.NewProcessServiceClient(cluster.Dial(t))
	var wg sync.WaitGroup
	followers := make([]*follower, processes)
	failures := make([]error, processes)
	for i := range followers {
		followers[i] = &follower{client: client, name: name}
		wg.Go(func() {
			failures[i] = followers[i].start(ctx, "sh", "-c", fmt.Sprintf("i=0; while [ $i -lt %d ]; do echo $i; i=$((i+1)); sleep 0.2; done", lines))
		})
	}
	known := func() bool {
		resp, err := client.ListProcesses(ctx, &processv1.ListProcessesRequest{Namespace: cluster.Namespace, Name: name})
		return err == nil && len(resp.GetProcesses()) == processes
	}
	require.True(t, eventually(settle, known), "the processes do not run")
	for _, program := range []string{"/gateway", "/agent", "/allocator"} {
		kill(t, program)
		require.True(t, eventually(time.Minute, known), "they are not known after the kill of %s", program)
	}
	wg.Wait()
	broken := 0
	for i, f := range followers {
		require.NoError(t, failures[i])
		require.Equal(t, want.String(), f.output.String(), "process %d", f.pid)
		require.Zero(t, f.exit.GetCode())
		broken += f.broken
	}
	require.GreaterOrEqual(t, broken, processes, "the streams were not broken")
	require.True(t, eventually(time.Minute, func() bool { return len(readyAgents(t)) > 0 }), "no agent is ready again")
}
