package app_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/metadata"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// open opens a stream and returns its response with a reader of its lines.
func (g *gateway) open(t *testing.T, path string, headers ...string) *stream {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, g.url+path, nil)
	require.NoError(t, err)
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := g.client.Do(req)
	require.NoError(t, err)
	t.Cleanup(func() { _ = resp.Body.Close() })
	return &stream{resp, bufio.NewReader(resp.Body)}
}

// stream is an open response.
type stream struct {
	answer *http.Response
	body   *bufio.Reader
}

func (s *stream) line(t *testing.T) string {
	t.Helper()
	line, err := s.body.ReadString('\n')
	require.NoError(t, err, line)
	return line
}

func event(kind sandboxv1.WatchSandboxesResponse_Type, name string) *sandboxv1.WatchSandboxesResponse {
	e := &sandboxv1.WatchSandboxesResponse{Type: kind}
	if name != "" {
		e.Sandbox = &sandboxv1.Sandbox{Name: name}
	}
	return e
}

func TestWatchSendsChangesAtOnce(t *testing.T) {
	next := make(chan *sandboxv1.WatchSandboxesResponse)
	var got *sandboxv1.WatchSandboxesRequest
	left := make(chan struct{})
	g := start(t, &fake{watch: func(in *sandboxv1.WatchSandboxesRequest, s sandboxv1.SandboxService_WatchSandboxesServer) error {
		defer close(left)
		got = in
		if err := s.SendHeader(metadata.MD{}); err != nil {
			return err
		}
		for {
			select {
			case e := <-next:
				if err := s.Send(e); err != nil {
					return err
				}
			case <-s.Context().Done():
				return s.Context().Err()
			}
		}
	}})
	// open returns when the headers arrive, which is before the first message.
	s := g.open(t, collection+":watch?name=a&phases=PHASE_RUNNING")
	require.Equal(t, http.StatusOK, s.answer.StatusCode)
	require.Equal(t, "application/x-ndjson", s.answer.Header.Get("Content-Type"))
	next <- event(sandboxv1.WatchSandboxesResponse_TYPE_ADDED, "a")
	require.JSONEq(t, `{"result":{"type":"TYPE_ADDED","sandbox":{"name":"a"}}}`, s.line(t))
	next <- event(sandboxv1.WatchSandboxesResponse_TYPE_SYNCED, "")
	require.JSONEq(t, `{"result":{"type":"TYPE_SYNCED"}}`, s.line(t))
	require.Equal(t, "ns1", got.GetNamespace())
	require.Equal(t, "a", got.GetName())
	require.Equal(t, []sandboxv1.Phase{sandboxv1.Phase_PHASE_RUNNING}, got.GetPhases())

	require.NoError(t, s.answer.Body.Close())
	<-left // the allocator sees that the caller has disconnected
}

func TestStreamErrors(t *testing.T) {
	full := fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "too slow").RetryIn(2 * time.Second)
	t.Run("before the first message", func(t *testing.T) {
		g := start(t, &fake{logs: func(*sandboxv1.StreamLogsRequest, sandboxv1.SandboxService_StreamLogsServer) error {
			return fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no such sandbox")
		}})
		for _, accept := range []string{"*/*", "text/plain"} {
			a := g.do(t, "GET", collection+"/a:logs", "", "Accept", accept)
			require.Equal(t, http.StatusNotFound, a.code)
			require.Equal(t, "SANDBOX_NOT_FOUND", a.failure(t).Details[0].Reason)
		}
	})
	t.Run("in mid-stream: the last line", func(t *testing.T) {
		g := start(t, &fake{watch: func(_ *sandboxv1.WatchSandboxesRequest, s sandboxv1.SandboxService_WatchSandboxesServer) error {
			return errors.Join(s.Send(event(sandboxv1.WatchSandboxesResponse_TYPE_SYNCED, "")), full)
		}})
		s := g.open(t, "/v1/sandboxes:watch")
		require.Equal(t, http.StatusOK, s.answer.StatusCode)
		s.line(t)
		last := s.line(t)
		require.Contains(t, last, `{"error":{"code":8,`)
		require.Contains(t, last, `"OVERLOADED"`)
		_, err := s.body.ReadByte()
		require.ErrorIs(t, err, io.EOF)
	})
	t.Run("in mid-stream of raw output: an aborted connection", func(t *testing.T) {
		g := start(t, &fake{logs: func(_ *sandboxv1.StreamLogsRequest, s sandboxv1.SandboxService_StreamLogsServer) error {
			return errors.Join(s.Send(&sandboxv1.StreamLogsResponse{Data: []byte("half")}), full)
		}})
		raw, err := io.ReadAll(g.open(t, collection+"/a:logs", "Accept", "text/plain").body)
		require.Error(t, err, "a truncated log must not look complete")
		require.Equal(t, "half", string(raw))
	})
}

func TestLogs(t *testing.T) {
	pieces := []string{"one\ntw", "o\x00\xff", "\n"}
	var got *sandboxv1.StreamLogsRequest
	g := start(t, &fake{logs: func(in *sandboxv1.StreamLogsRequest, s sandboxv1.SandboxService_StreamLogsServer) error {
		got = in
		for _, p := range pieces {
			if err := s.Send(&sandboxv1.StreamLogsResponse{Data: []byte(p)}); err != nil {
				return err
			}
		}
		return nil
	}})
	a := g.do(t, "GET", collection+"/a:logs?follow=true&tailLines=0&since=2030-01-02T03:04:05Z", "", "Accept", "text/plain, */*;q=0.5")
	require.Equal(t, http.StatusOK, a.code)
	require.Equal(t, "text/plain; charset=utf-8", a.header.Get("Content-Type"))
	require.Equal(t, strings.Join(pieces, ""), a.body, "byte for byte")
	require.True(t, got.GetFollow())
	require.NotNil(t, got.TailLines)
	require.EqualValues(t, 2030, got.GetSince().AsTime().Year())

	a = g.do(t, "GET", collection+"/a:logs", "", "Accept", "*/*")
	require.Equal(t, "application/x-ndjson", a.header.Get("Content-Type"))
	require.Equal(t, 3, strings.Count(a.body, "\n"))
	require.Contains(t, a.body, `{"result":{"data":"b25lCnR3"}}`+"\n")

	pieces = nil
	a = g.do(t, "GET", collection+"/a:logs", "", "Accept", "text/plain")
	require.Equal(t, http.StatusOK, a.code, "no output is no error")
	require.Empty(t, a.body)
}

// TestDrain stops the gateway during a stream and a create: the stream ends with an error, the create succeeds.
func TestDrain(t *testing.T) {
	creating, finish := make(chan struct{}), make(chan struct{})
	g := start(t, &fake{
		watch: func(_ *sandboxv1.WatchSandboxesRequest, s sandboxv1.SandboxService_WatchSandboxesServer) error {
			if err := s.Send(event(sandboxv1.WatchSandboxesResponse_TYPE_SYNCED, "")); err != nil {
				return err
			}
			<-s.Context().Done()
			return s.Context().Err()
		},
		create: func(ctx context.Context, _ *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
			close(creating)
			select {
			case <-finish:
				return &sandboxv1.CreateSandboxResponse{}, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		},
	})
	s := g.open(t, collection+":watch")
	s.line(t)
	created := make(chan answer, 1)
	go func() { created <- g.do(t, "POST", collection, `{"spec":{"image":"x","pool":"p"}}`) }()
	<-creating
	stopped := make(chan error, 1)
	go func() { stopped <- g.stop() }()
	last := s.line(t)
	require.Contains(t, last, `{"error":{"code":14,`)
	require.Contains(t, last, "the gateway is stopping")
	close(finish)
	require.Equal(t, http.StatusOK, (<-created).code)
	require.NoError(t, <-stopped)
	_, err := (&net.Dialer{Timeout: time.Second}).DialContext(t.Context(), "tcp", g.address)
	require.Error(t, err, "the port is closed")
}
