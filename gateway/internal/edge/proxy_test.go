package edge_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	tunnelv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/tunnel/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func TestProxyHalfClose(t *testing.T) {
	m := newMesh(t)
	m.agent(t, "a1", "x")
	stream, err := tunnelv1.NewTunnelServiceClient(m.conn).Tunnel(t.Context())
	require.NoError(t, err)
	for i := range uint32(3) {
		require.NoError(t, stream.Send(&tunnelv1.TunnelRequest{Namespace: "ns", Name: "x", Frame: &tunnelv1.Frame{Connection: i}}))
		out, err := stream.Recv()
		require.NoError(t, err)
		require.Equal(t, i, out.GetFrame().GetConnection())
	}
	require.NoError(t, stream.CloseSend())
	out, err := stream.Recv()
	require.NoError(t, err)
	require.EqualValues(t, 99, out.GetFrame().GetConnection(), "the agent may answer after the client has closed its side")
	_, err = stream.Recv()
	require.ErrorIs(t, err, io.EOF)
}

func TestProxyLargeMessages(t *testing.T) {
	m := newMesh(t)
	m.agent(t, "a1", "x")
	in := run("x", "1")
	in.Stdin = bytes.Repeat([]byte("x"), 4<<20)
	resp, err := m.processes().RunProcess(t.Context(), in)
	require.NoError(t, err)
	require.Len(t, resp.GetStdout(), 4<<20+len("a1:"))

	input, err := m.processes().StreamInput(t.Context())
	require.NoError(t, err)
	for range 8 {
		require.NoError(t, input.Send(&processv1.StreamInputRequest{Namespace: "ns", Name: "x", Data: make([]byte, 1<<20)}))
	}
	sum, err := input.CloseAndRecv()
	require.NoError(t, err)
	require.EqualValues(t, 8<<20, sum.GetWrittenBytes())
}

// TestProxyErrorWhileSending: the agent refuses a stream that the client still sends.
func TestProxyErrorWhileSending(t *testing.T) {
	m := newMesh(t)
	m.agent(t, "a1", "x")
	input, err := m.processes().StreamInput(t.Context())
	require.NoError(t, err)
	require.NoError(t, input.Send(&processv1.StreamInputRequest{Namespace: "ns", Name: "x", Data: []byte("refuse")}))
	for err == nil {
		err = input.Send(&processv1.StreamInputRequest{Data: []byte("more")})
	}
	require.ErrorIs(t, err, io.EOF)
	_, err = input.CloseAndRecv()
	requireReason(t, err, fault.ProcessConflict)
}

// TestProxyCancellation: an agent sees that the client has left, with each kind of call.
func TestProxyCancellation(t *testing.T) {
	m := newMesh(t)
	a := m.agent(t, "a1", "x")
	for name, call := range map[string]func(ctx context.Context) error{
		"unary": func(ctx context.Context) error {
			_, err := m.processes().RunProcess(ctx, run("x", "wait"))
			return err
		},
		"server stream": func(ctx context.Context) error {
			s, err := m.processes().StartProcess(ctx, &processv1.StartProcessRequest{Namespace: "ns", Name: "x", Process: &processv1.ProcessSpec{Args: []string{"1", "wait"}}})
			if err != nil {
				return err
			}
			for err == nil {
				_, err = s.Recv()
			}
			return err
		},
		"client stream": func(ctx context.Context) error {
			s, err := m.processes().StreamInput(ctx)
			if err != nil {
				return err
			}
			if err := s.Send(&processv1.StreamInputRequest{Namespace: "ns", Name: "x", Data: []byte("x")}); err != nil {
				return err
			}
			return s.RecvMsg(&processv1.StreamInputResponse{}) // without CloseSend: the end of its input could reach the agent first
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			a.mu.Lock()
			before := a.calls
			a.mu.Unlock()
			done := make(chan error, 1)
			go func() { done <- call(ctx) }()
			require.Eventually(t, func() bool { a.mu.Lock(); defer a.mu.Unlock(); return a.calls > before }, testkit.Timeout, testkit.Tick)
			cancel()
			require.Equal(t, codes.Canceled, status.Code(<-done))
			err := <-a.gone
			require.True(t, errors.Is(err, context.Canceled) || status.Code(err) == codes.Canceled, err)
		})
	}
}

// TestProxyDrain: streams end with an error that asks the client to connect again, and unary calls finish.
func TestProxyDrain(t *testing.T) {
	m := newMesh(t)
	a := m.agent(t, "a1", "x")
	s, err := m.processes().StartProcess(t.Context(), &processv1.StartProcessRequest{Namespace: "ns", Name: "x", Process: &processv1.ProcessSpec{Args: []string{"1", "wait"}}})
	require.NoError(t, err)
	_, err = s.Recv()
	require.NoError(t, err)
	input, err := m.processes().StreamInput(t.Context())
	require.NoError(t, err)
	require.NoError(t, input.Send(&processv1.StreamInputRequest{Namespace: "ns", Name: "x"}))
	require.Eventually(t, func() bool { a.mu.Lock(); defer a.mu.Unlock(); return a.calls == 2 }, testkit.Timeout, testkit.Tick)
	close(m.closing)
	_, err = s.Recv()
	requireReason(t, err, fault.AgentUnavailable)
	require.Contains(t, err.Error(), "the gateway is stopping")
	_, err = input.CloseAndRecv()
	requireReason(t, err, fault.AgentUnavailable)
	_ = <-a.gone
	_ = <-a.gone
	m.runsAt(t, "x", "a1")
}

// TestProxyTransfersFinish: a stream that ends by itself is not ended when the process stops.
func TestProxyTransfersFinish(t *testing.T) {
	m := newMesh(t)
	m.agent(t, "a1", "x")
	write, err := filesystemv1.NewFilesystemServiceClient(m.conn).WriteFile(t.Context())
	require.NoError(t, err)
	require.NoError(t, write.Send(&filesystemv1.WriteFileRequest{Namespace: "ns", Name: "x", Header: &filesystemv1.WriteFileHeader{Path: "/a"}}))
	close(m.closing)
	require.NoError(t, write.Send(&filesystemv1.WriteFileRequest{Data: []byte("late")}))
	resp, err := write.CloseAndRecv()
	require.NoError(t, err)
	require.EqualValues(t, 4, resp.GetWrittenBytes())
}
