package rest_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// TestReadFileThatChanges reads a file that is not what it was when the answer began.
func TestReadFileThatChanges(t *testing.T) {
	bothVersions(t, func(t *testing.T, http2 bool) {
		d := newDisk(map[string]string{"/a": strings.Repeat("x", 1<<20)})
		d.truncate = 10
		s := newInside(t, http2, d, nil)
		resp, err := s.client.Get(s.url + filesOf + "?path=/a") //nolint:noctx // a test
		require.NoError(t, err)
		require.EqualValues(t, 1<<20, resp.ContentLength)
		_, err = io.ReadAll(resp.Body)
		require.Error(t, err, "a truncated file must not look complete")
		require.NoError(t, resp.Body.Close())

		d.truncate = 1 << 20
		refused, body := s.do(t, "GET", filesOf+"?path=/a", nil)
		requireRefused(t, refused, body, http.StatusConflict, fault.FileChanged, "") // before the first byte
	})
}

// TestReaderThatStops reads a part of a large file: the agent is not asked for more than what the connections hold, and sees that the
// caller leaves.
func TestReaderThatStops(t *testing.T) {
	bothVersions(t, func(t *testing.T, http2 bool) {
		const size = 64 << 20
		d := newDisk(nil)
		d.files["/a"] = bytes.Repeat([]byte("x"), size)
		s := newInside(t, http2, d, nil)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+filesOf+"?path=/a", nil)
		require.NoError(t, err)
		resp, err := s.client.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		_, err = io.ReadFull(resp.Body, make([]byte, 1<<20))
		require.NoError(t, err)
		cancel()
		require.Equal(t, codes.Canceled, status.Code(<-d.ended))
		d.mu.Lock()
		defer d.mu.Unlock()
		require.Less(t, d.sent, int64(size/2), "bytes were buffered")
	})
}

// TestWriterThatLeaves sends half a body: the old file stays.
func TestWriterThatLeaves(t *testing.T) {
	for name, headers := range map[string]string{
		"with a length":    "Content-Length: 100\r\n\r\nhalf",
		"without a length": "Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			d := newDisk(map[string]string{"/a": "old"})
			s := newInside(t, false, d, nil)
			conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(s.url, "http://"))
			require.NoError(t, err)
			_, err = fmt.Fprintf(conn, "PUT %s?path=/a HTTP/1.1\r\nHost: h\r\n%s", filesOf, headers)
			require.NoError(t, err)
			require.Eventually(t, func() bool { d.mu.Lock(); defer d.mu.Unlock(); return len(d.calls) == 1 }, testkit.Timeout, testkit.Tick)
			require.NoError(t, conn.Close())
			require.Equal(t, codes.Canceled, status.Code(<-d.ended))
			require.Equal(t, "old", string(d.files["/a"]))
		})
	}
}

// TestWriteThatIsRefusedEarly sends the beginning of a body and then nothing: the refusal does not wait for the rest.
func TestWriteThatIsRefusedEarly(t *testing.T) {
	s := newInside(t, false, newDisk(nil), nil)
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(s.url, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	_, err = fmt.Fprintf(conn, "PUT %s?path=/forbidden HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\nbeginning", filesOf)
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: http.MethodPut})
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	requireRefused(t, replyOf(resp), string(body), http.StatusForbidden, fault.FileAccessDenied, "")
	require.True(t, resp.Close)
}

// TestConnectionAfterAWrite uses one connection for several writes and another request.
func TestConnectionAfterAWrite(t *testing.T) {
	s := newInside(t, false, newDisk(map[string]string{}), nil)
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(s.url, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	in := bufio.NewReader(conn)
	for i := range 5 {
		_, err = fmt.Fprintf(conn, "PUT %s?path=/%d HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc", filesOf, i)
		require.NoError(t, err)
		resp, err := http.ReadResponse(in, &http.Request{Method: http.MethodPut})
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, http.StatusOK, resp.StatusCode)
	}
}
