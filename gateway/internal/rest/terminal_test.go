package rest_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/rest"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
)

// shell is a ProcessService whose only process has pid 7 and writes back what it reads. Its input "exit" ends it with the code 3.
type shell struct {
	processv1.UnimplementedProcessServiceServer

	mu       sync.Mutex
	requests []proto.Message
	output   chan *processv1.ProcessOutput
	end      chan struct{}
	left     chan struct{} // gets a value when a stream of events ends before the process
}

func newShell() *shell {
	return &shell{output: make(chan *processv1.ProcessOutput, 16), end: make(chan struct{}), left: make(chan struct{}, 4)}
}

func (s *shell) record(m proto.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, proto.Clone(m))
}

// await waits for a request like want.
func (s *shell) await(t *testing.T, want proto.Message) {
	t.Helper()
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, r := range s.requests {
			if proto.Equal(r, want) {
				return true
			}
		}
		return false
	}, testkit.Timeout, testkit.Tick, "%v", want)
}

func (s *shell) follow(ctx context.Context, send func(*processv1.ProcessEvent) error) error {
	events := []*processv1.ProcessEvent{
		{Event: &processv1.ProcessEvent_Started{Started: &processv1.Process{Pid: 7, Terminal: true}}},
		{Event: &processv1.ProcessEvent_Keepalive_{Keepalive: &processv1.ProcessEvent_Keepalive{}}},
	}
	for _, e := range events {
		if err := send(e); err != nil {
			return err
		}
	}
	for {
		select {
		case out := <-s.output:
			if err := send(&processv1.ProcessEvent{Event: &processv1.ProcessEvent_Output{Output: out}}); err != nil {
				return err
			}
		case <-s.end:
			return send(&processv1.ProcessEvent{Event: &processv1.ProcessEvent_Ended{Ended: &processv1.ProcessExit{Code: 3}}})
		case <-ctx.Done():
			s.left <- struct{}{}
			return ctx.Err()
		}
	}
}

func (s *shell) StartProcess(in *processv1.StartProcessRequest, stream grpc.ServerStreamingServer[processv1.StartProcessResponse]) error {
	s.record(in)
	if in.GetProcess().GetArgs()[0] == "missing" {
		return rpc.ToStatus(fault.New(errdefs.ErrNotFound, fault.CommandNotFound, "missing: not found"))
	}
	return s.follow(stream.Context(), func(e *processv1.ProcessEvent) error { return stream.Send(&processv1.StartProcessResponse{Event: e}) })
}

func (s *shell) ConnectProcess(in *processv1.ConnectProcessRequest, stream grpc.ServerStreamingServer[processv1.ConnectProcessResponse]) error {
	s.record(in)
	return s.follow(stream.Context(), func(e *processv1.ProcessEvent) error { return stream.Send(&processv1.ConnectProcessResponse{Event: e}) })
}

func (s *shell) StreamInput(stream grpc.ClientStreamingServer[processv1.StreamInputRequest, processv1.StreamInputResponse]) error {
	offset := int64(100)
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&processv1.StreamInputResponse{})
		}
		if err != nil {
			return err
		}
		s.record(m)
		switch string(m.GetData()) {
		case "exit":
			close(s.end)
		case "refuse":
			return rpc.ToStatus(fault.New(errdefs.ErrFailedPrecondition, fault.ProcessConflict, "it has no input"))
		default:
			s.output <- &processv1.ProcessOutput{Stream: processv1.ProcessOutput_STREAM_TERMINAL, Offset: offset, Data: m.GetData()}
			offset += int64(len(m.GetData()))
		}
	}
}

func (s *shell) CloseInput(_ context.Context, in *processv1.CloseInputRequest) (*processv1.CloseInputResponse, error) {
	s.record(in)
	return &processv1.CloseInputResponse{}, nil
}

func (s *shell) ResizeTerminal(_ context.Context, in *processv1.ResizeTerminalRequest) (*processv1.ResizeTerminalResponse, error) {
	s.record(in)
	if in.GetSize().GetRows() < 0 {
		return nil, rpc.ToStatus(fault.Field("size.rows", "must be at least 0"))
	}
	return &processv1.ResizeTerminalResponse{}, nil
}

func (s *shell) SendSignal(_ context.Context, in *processv1.SendSignalRequest) (*processv1.SendSignalResponse, error) {
	s.record(in)
	return &processv1.SendSignalResponse{}, nil
}

const (
	terminalOf = "/v1/namespaces/ns/sandboxes/a/terminal"
	protocol   = "terminal.fast-sandbox.io"
)

// socket is an open WebSocket.
type socket struct{ *websocket.Conn }

// open opens a WebSocket; the answer is one that refuses it, if there is no socket.
func (s *inside) open(t *testing.T, query string, o *websocket.DialOptions) (*socket, reply, string) {
	t.Helper()
	if o == nil {
		o = &websocket.DialOptions{}
	}
	o.HTTPClient = s.client
	conn, resp, err := websocket.Dial(t.Context(), s.url+terminalOf+query, o)
	if err != nil {
		require.NotNil(t, resp, err)
		raw, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		return nil, replyOf(resp), string(raw)
	}
	t.Cleanup(func() { _ = conn.CloseNow() })
	return &socket{conn}, replyOf(resp), ""
}

func (s *socket) text(t *testing.T) map[string]any {
	t.Helper()
	kind, raw, err := s.Read(t.Context())
	require.NoError(t, err)
	require.Equal(t, websocket.MessageText, kind, "%q", raw)
	m := map[string]any{}
	require.NoError(t, json.Unmarshal(raw, &m))
	return m
}

func (s *socket) bytes(t *testing.T) string {
	t.Helper()
	kind, raw, err := s.Read(t.Context())
	require.NoError(t, err)
	require.Equal(t, websocket.MessageBinary, kind, "%q", raw)
	return string(raw)
}

func (s *socket) send(t *testing.T, kind websocket.MessageType, data string) {
	t.Helper()
	require.NoError(t, s.Write(t.Context(), kind, []byte(data)))
}

// closed waits for the end and returns its code.
func (s *socket) closed(t *testing.T) websocket.StatusCode {
	t.Helper()
	_, raw, err := s.Read(t.Context())
	require.Error(t, err, "%q", raw)
	return websocket.CloseStatus(err)
}

func pid7() *processv1.ProcessSelector {
	return &processv1.ProcessSelector{By: &processv1.ProcessSelector_Pid{Pid: 7}}
}

func TestTerminal(t *testing.T) {
	p := newShell()
	s := newInside(t, false, nil, p)
	c, _, _ := s.open(t, "?args=sh&args=-c&args=x+y&env=A=b=c&rows=24&columns=80&user=u&workingDir=/w&tag=mine&timeout=90s&killOnDisconnect=true&buffer_bytes=8192",
		&websocket.DialOptions{Subprotocols: []string{protocol}})
	require.Equal(t, protocol, c.Subprotocol())
	started := c.text(t)
	require.Equal(t, "started", started["type"])
	require.InDelta(t, 7, started["process"].(map[string]any)["pid"], 0) //nolint:forcetypeassert // a test
	p.await(t, &processv1.StartProcessRequest{
		Namespace: "ns", Name: "a", Terminal: &processv1.TerminalSize{Rows: 24, Columns: 80}, KillOnDisconnect: true, BufferBytes: 8192,
		Process: &processv1.ProcessSpec{
			Args: []string{"sh", "-c", "x y"}, Env: map[string]string{"A": "b=c"}, User: "u", WorkingDir: "/w", Tag: "mine", Timeout: durationpb.New(90_000_000_000),
		},
	})

	c.send(t, websocket.MessageBinary, "ls\n")
	require.Equal(t, map[string]any{"type": "offset", "offset": float64(100)}, c.text(t))
	require.Equal(t, "ls\n", c.bytes(t))
	c.send(t, websocket.MessageBinary, "\xff\x00")
	require.Equal(t, "\xff\x00", c.bytes(t), "no offset is repeated")
	p.output <- &processv1.ProcessOutput{Stream: processv1.ProcessOutput_STREAM_STDERR, Offset: 200, Data: []byte("oh")}
	require.Equal(t, map[string]any{"type": "offset", "offset": float64(200)}, c.text(t), "95 bytes were lost")
	require.Equal(t, "\x02oh", c.bytes(t))

	c.send(t, websocket.MessageText, `{"type":"resize","rows":30,"columns":100}`)
	p.await(t, &processv1.ResizeTerminalRequest{Namespace: "ns", Name: "a", Process: pid7(), Size: &processv1.TerminalSize{Rows: 30, Columns: 100}})
	c.send(t, websocket.MessageText, `{"type":"signal","signal":2,"group":true}`)
	p.await(t, &processv1.SendSignalRequest{Namespace: "ns", Name: "a", Process: pid7(), Signal: 2, Group: true})
	c.send(t, websocket.MessageText, `{"type":"closeInput"}`)
	p.await(t, &processv1.CloseInputRequest{Namespace: "ns", Name: "a", Process: pid7()})

	for _, tc := range []struct{ message, of, reason, field string }{
		{`{"type":"resize","rows":-1}`, "resize", "INVALID_FIELD", "size.rows"},
		{`{"type":"dance"}`, "dance", "INVALID_FIELD", "type"},
		{`{"type":"signal","pid":1}`, "signal", "INVALID_FIELD", "type"},
		{`nonsense`, "unknown", "INVALID_FIELD", "type"},
	} {
		c.send(t, websocket.MessageText, tc.message)
		m := c.text(t)
		require.Equal(t, tc.of, m["of"], "%v", m)
		detail := m["error"].(map[string]any)["details"].([]any)[0].(map[string]any) //nolint:forcetypeassert // a test
		require.Equal(t, tc.reason, detail["reason"])
		require.Equal(t, tc.field, detail["metadata"].(map[string]any)["field"]) //nolint:forcetypeassert // a test
	}
	c.send(t, websocket.MessageBinary, "refuse")
	require.Equal(t, "input", inputError(t, c)["of"])
	c.send(t, websocket.MessageBinary, "exit")
	ended := c.text(t)
	require.Equal(t, map[string]any{"type": "ended", "exit": map[string]any{"code": float64(3)}}, ended)
	require.Equal(t, websocket.StatusNormalClosure, c.closed(t))
}

// inputError sends input until its refusal arrives: the call that was refused may take one more piece.
func inputError(t *testing.T, c *socket) map[string]any {
	t.Helper()
	c.send(t, websocket.MessageText, `{"type":"closeInput"}`)
	return c.text(t)
}

func TestTerminalAttaches(t *testing.T) {
	p := newShell()
	s := newInside(t, false, nil, p)
	c, _, _ := s.open(t, "?tag=mine&fromOffset=-1&lossy=true", nil)
	require.Equal(t, "started", c.text(t)["type"])
	p.await(t, &processv1.ConnectProcessRequest{
		Namespace: "ns", Name: "a", FromOffset: -1, Lossy: true, Process: &processv1.ProcessSelector{By: &processv1.ProcessSelector_Tag{Tag: "mine"}},
	})
	require.NoError(t, c.Close(websocket.StatusNormalClosure, ""))
	<-p.left // the agent sees that the caller has left

	c, _, _ = s.open(t, "?pid=7", nil)
	require.Equal(t, "started", c.text(t)["type"])
	c.send(t, websocket.MessageBinary, strings.Repeat("x", 1<<20))
	require.Equal(t, "offset", c.text(t)["type"])
	c.SetReadLimit(2 << 20)
	require.Len(t, c.bytes(t), 1<<20)
	require.Error(t, errors.Join(c.Write(t.Context(), websocket.MessageBinary, make([]byte, 1<<20+1)), func() error { _, _, err := c.Read(t.Context()); return err }()))
	<-p.left
}

func TestTerminalRefusalOfTheCall(t *testing.T) {
	s := newInside(t, false, nil, newShell())
	c, _, _ := s.open(t, "?args=missing", nil)
	m := c.text(t)
	require.Equal(t, "error", m["type"])
	require.Contains(t, m["error"].(map[string]any)["message"], "missing: not found") //nolint:forcetypeassert // a test
	require.Nil(t, m["of"])
	_, _, err := c.Read(t.Context())
	var closed websocket.CloseError
	require.ErrorAs(t, err, &closed)
	require.Equal(t, websocket.StatusInternalError, closed.Code)
	require.Equal(t, "COMMAND_NOT_FOUND", closed.Reason)
}

func TestTerminalDrain(t *testing.T) {
	sessions := &sync.WaitGroup{}
	p := newShell()
	s := newInside(t, false, nil, p, func(c *rest.Config) { c.Sessions = sessions })
	c, _, _ := s.open(t, "?args=sh", nil)
	require.Equal(t, "started", c.text(t)["type"])
	close(s.draining)
	require.Equal(t, websocket.StatusGoingAway, c.closed(t))
	<-p.left
	sessions.Wait()
}

func TestTerminalsThatAreRefused(t *testing.T) {
	s := newInside(t, false, nil, newShell(), func(c *rest.Config) {
		c.Tokens = users.Tokens{"good": {User: "alice", Method: auth.Token}}
		c.Origins = []string{"https://console.example.com"}
	})
	token := func(s string) string {
		return "base64url.bearer.authorization.fast-sandbox.io." + base64.RawURLEncoding.EncodeToString([]byte(s))
	}
	good := func(h ...string) http.Header {
		header := http.Header{"Authorization": {"Bearer good"}}
		for i := 0; i+1 < len(h); i += 2 {
			header.Set(h[i], h[i+1])
		}
		return header
	}
	for name, tc := range map[string]struct {
		query     string
		header    http.Header
		protocols []string
		code      int
		reason    fault.Reason
		field     string
	}{
		"no credentials":        {"?args=sh", nil, nil, 401, fault.Unauthenticated, ""},
		"wrong token":           {"?args=sh", nil, []string{protocol, token("bad")}, 401, fault.Unauthenticated, ""},
		"broken token":          {"?args=sh", nil, []string{protocol, token("good") + "!"}, 401, fault.Unauthenticated, ""},
		"empty token":           {"?args=sh", nil, []string{protocol, token("")}, 401, fault.Unauthenticated, ""},
		"two tokens":            {"?args=sh", nil, []string{protocol, token("good"), token("good")}, 401, fault.Unauthenticated, ""},
		"a token in each place": {"?args=sh", good(), []string{protocol, token("good")}, 401, fault.Unauthenticated, ""},
		"page of another site":  {"?args=sh", good("Origin", "https://evil.example.com"), nil, 403, fault.PermissionDenied, ""},
		"origin that is none":   {"?args=sh", good("Origin", "null"), nil, 403, fault.PermissionDenied, ""},
		"another protocol":      {"?args=sh", good(), []string{"v5.channel.k8s.io"}, 400, fault.InvalidField, "Sec-WebSocket-Protocol"},
		"token alone":           {"?args=sh", nil, []string{token("good")}, 400, fault.InvalidField, "Sec-WebSocket-Protocol"},
		"nothing to do":         {"", good(), nil, 400, fault.InvalidField, "args"},
		"pid and tag":           {"?pid=1&tag=x", good(), nil, 400, fault.InvalidField, "args"},
		"args and pid":          {"?args=sh&pid=1", good(), nil, 400, fault.InvalidField, "pid"},
		"pid that is no number": {"?pid=x", good(), nil, 400, fault.InvalidField, "pid"},
		"unknown parameter":     {"?args=sh&shell=1", good(), nil, 400, fault.InvalidField, "shell"},
		"env without a value":   {"?args=sh&env=A", good(), nil, 400, fault.InvalidField, "env"},
		"no duration":           {"?args=sh&timeout=90", good(), nil, 400, fault.InvalidField, "timeout"},
		"no flag":               {"?args=sh&terminal=no", good(), nil, 400, fault.InvalidField, "terminal"},
		"size of no terminal":   {"?args=sh&terminal=false&rows=3", good(), nil, 400, fault.InvalidField, "rows"},
		"size that is none":     {"?args=sh&rows=x", good(), nil, 400, fault.InvalidField, "rows"},
		"offset that is none":   {"?pid=1&fromOffset=x", good(), nil, 400, fault.InvalidField, "fromOffset"},
		"not UTF-8":             {"?args=%ff", good(), nil, 400, fault.InvalidField, "query"},
	} {
		t.Run(name, func(t *testing.T) {
			c, resp, body := s.open(t, tc.query, &websocket.DialOptions{HTTPHeader: tc.header, Subprotocols: tc.protocols})
			require.Nil(t, c)
			requireRefused(t, resp, body, tc.code, tc.reason, tc.field)
		})
	}
	for name, tc := range map[string]struct {
		header    http.Header
		protocols []string
	}{
		"token among the protocols": {nil, []string{protocol, token("good")}},
		"page of an allowed site":   {good("Origin", "https://console.example.com"), nil},
		"page of the same site":     {good("Origin", s.url), nil},
	} {
		t.Run(name, func(t *testing.T) {
			c, resp, body := s.open(t, "?args=sh", &websocket.DialOptions{HTTPHeader: tc.header, Subprotocols: tc.protocols})
			require.NotNil(t, c, body)
			require.NotContains(t, resp.Header.Get("Sec-WebSocket-Protocol"), "bearer")
			require.Equal(t, "started", c.text(t)["type"])
		})
	}
	resp, body := s.do(t, "GET", terminalOf+"?args=sh", nil, "Authorization", "Bearer good")
	requireRefused(t, resp, body, http.StatusUpgradeRequired, fault.InvalidField, "Upgrade")
	resp, _ = s.do(t, "POST", terminalOf+"?args=sh", nil, "Authorization", "Bearer good")
	require.Equal(t, http.StatusMethodNotAllowed, resp.StatusCode)
}

// TestTerminalPings: an idle caller is asked whether it is there, and one that answers stays.
func TestTerminalPings(t *testing.T) {
	c, p := clocktesting.NewFakeClock(time.Now()), newShell()
	s := newInside(t, false, nil, p, func(cfg *rest.Config) { cfg.Clock = c })
	pings := make(chan struct{}, 8)
	ws, _, _ := s.open(t, "?args=sh", &websocket.DialOptions{OnPingReceived: func(context.Context, []byte) bool {
		pings <- struct{}{}
		return true
	}})
	require.Equal(t, "started", ws.text(t)["type"])
	received := make(chan string, 1)
	go func() {
		for {
			kind, raw, err := ws.Read(t.Context()) // answers pings, too
			if err != nil || kind == websocket.MessageBinary {
				received <- string(raw)
				return
			}
		}
	}()
	for range 3 {
		require.Eventually(t, c.HasWaiters, testkit.Timeout, testkit.Tick) // the last ping was answered
		c.Step(31 * time.Second)
		<-pings
	}
	p.output <- &processv1.ProcessOutput{Stream: processv1.ProcessOutput_STREAM_TERMINAL, Data: []byte("still here")}
	require.Equal(t, "still here", <-received)
}
