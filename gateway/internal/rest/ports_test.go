package rest_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coder/websocket"
	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/rest"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/faketunnel"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
)

const portsOf = "/v1/namespaces/ns/sandboxes/a/ports/"

// garbage is a port whose server does not speak HTTP.
const garbage = 82

// newPorts serves REST in front of a sandbox with an HTTP server at port 80. Redirects are not followed.
func newPorts(t *testing.T, http2 bool, tunnels *faketunnel.Server, serve http.HandlerFunc, change ...func(*rest.Config)) *inside {
	t.Helper()
	backend := httptest.NewServer(serve)
	t.Cleanup(backend.Close)
	tunnels.Connect = func(ctx context.Context, port int) (net.Conn, error) {
		switch port {
		case 80:
			return (&net.Dialer{}).DialContext(ctx, "tcp", backend.Listener.Addr().String())
		case garbage:
			near, far := net.Pipe()
			go func() {
				defer far.Close()
				_, _ = far.Read(make([]byte, 1))
				_, _ = far.Write([]byte("no HTTP\r\n\r\n"))
			}()
			return near, nil
		}
		return nil, errors.New("refused")
	}
	conn := tunnels.Serve(t)
	s := newInside(t, http2, nil, nil, append([]func(*rest.Config){func(c *rest.Config) { c.Sandboxes = conn }}, change...)...)
	s.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return s
}

// what returns a handler that says what it was asked.
func what(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	w.Header().Set("Server", "of the sandbox")
	fmt.Fprintf(w, "%s %s %s", r.Method, r.RequestURI, body)
}

// TestPortsPassOn: the path, the query, the method and the body arrive as they were sent, and so does the answer.
func TestPortsPassOn(t *testing.T) {
	bothVersions(t, func(t *testing.T, http2 bool) {
		s := newPorts(t, http2, faketunnel.New(nil), what)
		for path, want := range map[string]string{
			"80": "/", "80/": "/", "80/some/path?q=1&q=%20": "/some/path?q=1&q=%20", "80?q": "/?q", "80/?": "/?",
			"80/a%2Fb/../c/./d//e": "/a%2Fb/../c/./d//e", "80//": "//", "80/../../b/files?path=/": "/../../b/files?path=/",
			"80/a;b?c;d&%zz": "/a;b?c;d&%zz", "80/%E4%BD%A0": "/%E4%BD%A0", "80/files": "/files",
		} {
			resp, body := s.do(t, "GET", portsOf+path, nil)
			require.Equal(t, http.StatusOK, resp.StatusCode, body)
			require.Equal(t, "GET "+want+" ", body, path)
			require.Equal(t, "of the sandbox", resp.Header.Get("Server"))
		}
		for _, method := range []string{"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"} {
			resp, body := s.do(t, method, portsOf+"80/x", strings.NewReader("a body"))
			require.Equal(t, http.StatusOK, resp.StatusCode, body)
			require.Equal(t, method+" /x a body", body)
		}
		resp, body := s.do(t, "HEAD", portsOf+"80/x", nil)
		require.EqualValues(t, len("HEAD /x "), resp.ContentLength)
		require.Empty(t, body)
		// a body without a length
		resp, body = s.do(t, "POST", portsOf+"80/x", io.MultiReader(strings.NewReader("in "), strings.NewReader("pieces")))
		require.Equal(t, http.StatusOK, resp.StatusCode)
		require.Equal(t, "POST /x in pieces", body)
		close(s.draining)
		resp, _ = s.do(t, "GET", portsOf+"80/", nil)
		require.Equal(t, http.StatusOK, resp.StatusCode)
	})
}

// TestPortsHeaders: credentials and connection headers stay here, and a server in a sandbox gives browsers no orders about the gateway.
func TestPortsHeaders(t *testing.T) {
	bothVersions(t, func(t *testing.T, http2 bool) {
		dangerous := map[string]string{
			"Set-Cookie": "a=b", "Clear-Site-Data": "*", "Strict-Transport-Security": "max-age=0", "Access-Control-Allow-Origin": "*", "Service-Worker-Allowed": "/",
			"Access-Control-Allow-Credentials": "true", "Alt-Svc": `h2="evil:443"`, "Refresh": "0; url=/v1/sandboxes", "Www-Authenticate": "Basic",
			"Nel": "{}", "Report-To": "{}",
		}
		got, host := http.Header{}, ""
		s := newPorts(t, http2, faketunnel.New(nil), func(w http.ResponseWriter, r *http.Request) {
			got, host = r.Header, r.Host
			for name, value := range dangerous {
				w.Header().Set(name, value)
			}
			w.Header().Set("Content-Security-Policy", "default-src *")
			w.Header().Set("X-Request-Id", "theirs")
			w.Header().Set("Cache-Control", "public")
			w.Header().Set("X-Content-Type-Options", "theirs")
			w.Header().Set("Content-Type", "text/html")
			w.Header().Set("X-Theirs", "1")
			w.Header().Set("Link", "</style.css>")
			w.WriteHeader(http.StatusEarlyHints)
			w.WriteHeader(http.StatusTeapot)
		}, func(c *rest.Config) { c.Tokens = users.Tokens{"good": {User: "alice", Method: auth.Token}} })
		headers := []string{
			"Authorization", "Bearer good", "Cookie", "a=b", "X-Forwarded-For", "1.2.3.4", "X-Forwarded-Prefix", "/theirs", "Forwarded", "for=1.2.3.4",
			"X-Request-Id", "mine", "X-Mine", "1", "Proxy-Authorization", "Basic x", "User-Agent", "test",
		}
		if !http2 {
			headers = append(headers, "Connection", "X-Hop", "X-Hop", "1")
		}
		resp, _ := s.do(t, "GET", portsOf+"80/x", nil, headers...)
		require.Equal(t, http.StatusTeapot, resp.StatusCode)
		for _, name := range []string{"Authorization", "Cookie", "Forwarded", "X-Hop", "Proxy-Authorization"} {
			require.Empty(t, got.Values(name), name)
		}
		proto := map[bool]string{false: "http", true: "https"}[http2]
		for name, want := range map[string]string{
			"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Host": s.url[strings.LastIndex(s.url, "/")+1:], "X-Forwarded-Proto": proto,
			"X-Forwarded-Prefix": portsOf + "80", "X-Request-Id": "mine", "X-Mine": "1", "User-Agent": "test",
		} {
			require.Equal(t, []string{want}, got.Values(name), name)
		}
		require.Equal(t, "localhost:80", host)
		for name := range dangerous {
			require.Empty(t, resp.Header.Values(name), name)
		}
		for name, want := range map[string]string{
			"Content-Security-Policy": "sandbox", "X-Request-Id": "mine", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
			"Content-Type": "text/html", "X-Theirs": "1",
		} {
			require.Equal(t, []string{want}, resp.Header.Values(name), name)
		}
	})
}

// TestPortsRedirects: a redirect of a server to itself stays in its sandbox, however it is written.
func TestPortsRedirects(t *testing.T) {
	const own = portsOf + "80"
	s := newPorts(t, false, faketunnel.New(nil), func(w http.ResponseWriter, r *http.Request) {
		w.Header()["Location"] = []string{r.Header.Get("To")}
		w.WriteHeader(http.StatusTemporaryRedirect)
	})
	gateway := strings.TrimPrefix(s.url, "http://")
	for to, want := range map[string]string{
		"/login?a=b#c": own + "/login?a=b#c", "next": own + "/dir/next", "../../../next": own + "/next", "?q=1": own + "/dir/page?q=1",
		"http://localhost:80/x": own + "/x", "http://127.0.0.1:80": own + "/", own + "/x": own + "/x", "/a%2Fb": own + "/a%2Fb",
		"https://example.com/x": "https://example.com/x", "//example.com/x": "//example.com/x", "http://localhost:81/": "http://localhost:81/",
		"/v1/sandboxes":                own + "/v1/sandboxes",
		"http://" + gateway + "/v1/x":  own + "/v1/x",
		"//" + gateway + "/v1/x":       own + "/v1/x",
		own + "/../../../b":            own + "/v1/namespaces/ns/sandboxes/b",
		own + "/%2e%2E/%2e./.%2e/b":    own + "/v1/namespaces/ns/sandboxes/b",
		own + `/..\..\..\b`:            own + `/..%5C..%5C..%5Cb`,
		"http:/v1/x":                   "",
		"HTTPS:v1/x":                   "",
		"http:\\\\" + gateway + "\\v1": "",
		"http://[":                     "",
		"/\\" + gateway + "/v1/x":      own + "/%5C" + gateway + "/v1/x",
	} {
		resp, _ := s.do(t, "POST", own+"/dir/page", nil, "To", to)
		require.Equal(t, http.StatusTemporaryRedirect, resp.StatusCode)
		require.Equal(t, want, resp.Header.Get("Location"), to)
	}
}

// TestPortsStream passes on what a server sends while the body of the request still comes, in both directions.
func TestPortsStream(t *testing.T) {
	bothVersions(t, func(t *testing.T, http2 bool) {
		s := newPorts(t, http2, faketunnel.New(nil), func(w http.ResponseWriter, r *http.Request) {
			_ = http.NewResponseController(w).EnableFullDuplex()
			buffer := make([]byte, 32<<10)
			for {
				n, err := r.Body.Read(buffer)
				_, _ = w.Write(buffer[:n])
				_ = http.NewResponseController(w).Flush()
				if err != nil {
					return
				}
			}
		})
		out, in := io.Pipe()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+portsOf+"80/", out)
		require.NoError(t, err)
		go func() { _, _ = in.Write([]byte("first")) }()
		resp, err := s.client.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		raw := make([]byte, len("first"))
		_, err = io.ReadFull(resp.Body, raw) // before the body has ended
		require.NoError(t, err)
		require.Equal(t, "first", string(raw))
		sent := make([]byte, 8<<20)
		_, _ = rand.Read(sent)
		go func() { _, _ = in.Write(sent); _ = in.Close() }()
		received, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.True(t, bytes.Equal(sent, received))
	})
}

// TestPortsThatAreRefused: what comes before the answer of a server is an error in the form of all others.
func TestPortsThatAreRefused(t *testing.T) {
	tunnels := faketunnel.New(nil)
	tunnels.Refuse = func(_, name string) error {
		switch name {
		case "missing":
			return rpc.ToStatus(fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no such sandbox"))
		case "forbidden":
			return rpc.ToStatus(fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied, "alice may not create sandboxes/portforward"))
		case "away":
			return rpc.ToStatus(fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent is away"))
		}
		return nil
	}
	s := newPorts(t, false, tunnels, what, func(c *rest.Config) {
		c.Tokens = users.Tokens{"good": {User: "alice", Method: auth.Token}}
		c.Origins = []string{"https://console.example.com"}
	})
	good := []string{"Authorization", "Bearer good"}
	with := func(h ...string) []string { return append([]string{"Authorization", "Bearer good"}, h...) }
	of := func(name string) string { return "/v1/namespaces/ns/sandboxes/" + name + "/ports/80/x" }
	for name, tc := range map[string]struct {
		path    string
		headers []string
		code    int
		reason  fault.Reason
		field   string
	}{
		"port 0":                {portsOf + "0/", good, 400, fault.InvalidField, "port"},
		"port that is too high": {portsOf + "65536/", good, 400, fault.InvalidField, "port"},
		"negative port":         {portsOf + "-1/", good, 400, fault.InvalidField, "port"},
		"port with zeros":       {portsOf + "080/", good, 400, fault.InvalidField, "port"},
		"no number":             {portsOf + "http/", good, 400, fault.InvalidField, "port"},
		"escaped number":        {portsOf + "%38%30/", good, 400, fault.InvalidField, "port"},
		"no port":               {portsOf, good, 400, fault.InvalidField, "port"},
		"name that is no text":  {of("%ff"), good, 400, fault.InvalidField, "name"},
		"nothing listens":       {portsOf + "81/", good, 502, fault.PortUnavailable, ""},
		"no HTTP":               {fmt.Sprint(portsOf, garbage, "/"), good, 502, fault.PortUnavailable, ""},
		"no such sandbox":       {of("missing"), good, 404, fault.SandboxNotFound, ""},
		"no right":              {of("forbidden"), good, 403, fault.PermissionDenied, ""},
		"agent away":            {of("away"), good, 503, fault.AgentUnavailable, ""},
		"no credentials":        {of("a"), nil, 401, fault.Unauthenticated, ""},
		"wrong credentials":     {of("a"), []string{"Authorization", "Bearer bad"}, 401, fault.Unauthenticated, ""},
		"page of another site":  {of("a"), with("Origin", "https://evil.example.com"), 403, fault.PermissionDenied, ""},
		"image in another site": {of("a"), with("Sec-Fetch-Site", "cross-site"), 403, fault.PermissionDenied, ""},
		"two tokens":            {of("a"), with("Sec-Websocket-Protocol", "base64url.bearer.authorization.fast-sandbox.io.Z29vZA"), 401, fault.Unauthenticated, ""},
	} {
		t.Run(name, func(t *testing.T) {
			for _, method := range []string{"GET", "POST", "HEAD"} {
				resp, body := s.do(t, method, tc.path, nil, tc.headers...)
				requireRefused(t, resp, body, tc.code, tc.reason, tc.field)
			}
		})
	}
	resp, body := s.do(t, "GET", of("a"), nil, with("Origin", "https://console.example.com", "Sec-Fetch-Site", "cross-site")...)
	require.Equal(t, http.StatusOK, resp.StatusCode, body)
	require.Equal(t, "https://console.example.com", resp.Header.Get("Access-Control-Allow-Origin"))
}

// TestPortsWebSocket: a server in a sandbox may switch protocols, and learns nothing of the token.
func TestPortsWebSocket(t *testing.T) {
	tunnels := faketunnel.New(nil)
	protocols := make(chan string, 1)
	s := newPorts(t, false, tunnels, func(w http.ResponseWriter, r *http.Request) {
		protocols <- strings.Join(r.Header.Values("Sec-Websocket-Protocol"), ",")
		w.Header().Set("Set-Cookie", "a=b")
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{"chat"}})
		if err != nil {
			return
		}
		defer func() { _ = c.CloseNow() }()
		for {
			kind, raw, err := c.Read(r.Context())
			if err != nil {
				return
			}
			_ = c.Write(r.Context(), kind, append([]byte("echo "), raw...))
		}
	}, func(c *rest.Config) { c.Tokens = users.Tokens{"good": {User: "alice", Method: auth.Token}} })
	c, resp, err := websocket.Dial(t.Context(), s.url+portsOf+"80/ws", &websocket.DialOptions{ //nolint:bodyclose // it is the connection
		HTTPClient: s.client, Subprotocols: []string{"chat", "base64url.bearer.authorization.fast-sandbox.io.Z29vZA"},
	})
	require.NoError(t, err)
	defer func() { _ = c.CloseNow() }()
	require.Equal(t, "chat", <-protocols)
	require.Equal(t, "chat", c.Subprotocol())
	require.Empty(t, resp.Header.Values("Set-Cookie"))
	for _, text := range []string{"one", "two"} {
		require.NoError(t, c.Write(t.Context(), websocket.MessageText, []byte(text)))
		_, raw, err := c.Read(t.Context())
		require.NoError(t, err)
		require.Equal(t, "echo "+text, string(raw))
	}
	require.NoError(t, c.Close(websocket.StatusNormalClosure, ""))
	require.Error(t, <-tunnels.Ended)
}

// TestPortsCallerThatLeaves: the server in the sandbox sees it, and the stream ends.
func TestPortsCallerThatLeaves(t *testing.T) {
	bothVersions(t, func(t *testing.T, http2 bool) {
		tunnels, left := faketunnel.New(nil), make(chan struct{})
		s := newPorts(t, http2, tunnels, func(w http.ResponseWriter, r *http.Request) {
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
			close(left)
		})
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+portsOf+"80/", nil)
		require.NoError(t, err)
		resp, err := s.client.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		cancel()
		<-left
		require.Equal(t, codes.Canceled, status.Code(<-tunnels.Ended))
	})
}

// TestPortsStreamIsLost: an answer that breaks off does not look complete, also not one that has no length.
func TestPortsStreamIsLost(t *testing.T) {
	bothVersions(t, func(t *testing.T, http2 bool) {
		tunnels := faketunnel.New(nil)
		tunnels.Broken = make(chan struct{})
		s := newPorts(t, http2, tunnels, func(w http.ResponseWriter, r *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return
			}
			defer conn.Close()
			_, _ = io.WriteString(conn, "HTTP/1.0 200 OK\r\n\r\nbeginning")
			_, _ = conn.Read(make([]byte, 1))
		})
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url+portsOf+"80/", nil)
		require.NoError(t, err)
		resp, err := s.client.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		_, err = io.ReadFull(resp.Body, make([]byte, len("beginning")))
		require.NoError(t, err)
		close(tunnels.Broken)
		_, err = io.ReadAll(resp.Body)
		require.Error(t, err)
	})
}

// TestPortsAnswerBeforeTheBody: a server may refuse a body that it does not read. The rest of it is never taken for another request.
func TestPortsAnswerBeforeTheBody(t *testing.T) {
	s := newPorts(t, false, faketunnel.New(nil), func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusRequestEntityTooLarge)
	})
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(s.url, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	_, err = fmt.Fprintf(conn, "POST %s80/ HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\nbeginning", portsOf)
	require.NoError(t, err)
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, &http.Request{Method: http.MethodPost})
	require.NoError(t, err)
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusRequestEntityTooLarge, resp.StatusCode)
	require.True(t, resp.Close)
	rest, _ := io.ReadAll(in)
	require.Empty(t, string(rest))
}

// TestPortsConnectionIsKept uses one connection of a caller for several requests with bodies.
func TestPortsConnectionIsKept(t *testing.T) {
	tunnels := faketunnel.New(nil)
	s := newPorts(t, false, tunnels, what)
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(s.url, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	in := bufio.NewReader(conn)
	for range 5 {
		_, err = fmt.Fprintf(conn, "PUT %s80/x HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc", portsOf)
		require.NoError(t, err)
		resp, err := http.ReadResponse(in, &http.Request{Method: http.MethodPut})
		require.NoError(t, err)
		raw, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, "PUT /x abc", string(raw))
		require.False(t, resp.Close)
		require.Error(t, <-tunnels.Ended) // each has a stream of its own
	}
}
