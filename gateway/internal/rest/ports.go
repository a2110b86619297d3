package rest

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	tunnelv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/tunnel/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/tunnel"
)

const (
	// portsPath is the path of the HTTP servers in sandboxes.
	portsPath = "/v1/namespaces/{namespace}/sandboxes/{name}/ports/{port}/{path...}"
	// prefixHeader has the part of the path that the server does not see.
	prefixHeader = "X-Forwarded-Prefix"
	// continueTimeout is how long a server may take to ask for a body that waits for it.
	continueTimeout = time.Second
)

// ports passes requests on to HTTP servers in sandboxes.
type ports struct {
	api     *api
	service tunnelv1.TunnelServiceClient
	pattern *regexp.Regexp
	inner   http.Handler
	next    http.Handler
	origin  *http.CrossOriginProtection
}

// newPorts returns a handler that serves portsPath, and passes all else on. It is in front of http.ServeMux, which would redirect a path with //
// or .. to another one: these are the server's to understand.
func newPorts(a *api, origin *http.CrossOriginProtection, next http.Handler) http.Handler {
	p := &ports{
		api: a, service: tunnelv1.NewTunnelServiceClient(rpc.OnBehalf(a.config.Sandboxes)), next: next, origin: origin,
		pattern: regexp.MustCompile(`^/v1/namespaces/([^/]+)/sandboxes/([^/]+)/ports/([^/]*)(/.*)?$`),
	}
	p.inner = a.authenticated(http.HandlerFunc(p.serve))
	return p
}

// ServeHTTP implements http.Handler.
func (p *ports) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !p.pattern.MatchString(r.URL.EscapedPath()) {
		p.next.ServeHTTP(w, r)
		return
	}
	a := p.api
	a.withoutDeadlines(w)
	exchangeOf(r.Context()).route = portsPath
	err := p.checkSite(r)
	if err == nil {
		err = tokenFromProtocol(r.Header)
	}
	if err != nil {
		a.recordRefusal(r, err)
		a.writeError(r.Context(), w, err, 0)
		return
	}
	if r.Header.Get(protocolHeader) == "" {
		r.Header.Del(protocolHeader)
	}
	p.inner.ServeHTTP(w, r)
}

// checkSite refuses a page of another site, unless it is allowed. For other paths, GET is safe. Here it may do anything, and open a WebSocket.
func (p *ports) checkSite(r *http.Request) error {
	unsafe := *r
	unsafe.Method = http.MethodPost
	if p.origin.Check(&unsafe) != nil {
		return fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied, "cross-origin requests are not allowed")
	}
	return nil
}

// destination is where a request goes.
type destination struct {
	namespace, name string
	port            int
	// prefix is the path up to the port, and path what follows, both as they were sent.
	prefix, path string
}

// destination returns that of a request whose path matches the pattern.
func (p *ports) destination(r *http.Request) (destination, error) {
	whole := r.URL.EscapedPath()
	m := p.pattern.FindStringSubmatch(whole)
	d := destination{path: m[4], prefix: whole[:len(whole)-len(m[4])]}
	if d.path == "" {
		d.path = "/"
	}
	for field, part := range map[string]struct {
		to   *string
		text string
	}{"namespace": {&d.namespace, m[1]}, "name": {&d.name, m[2]}} {
		text, err := url.PathUnescape(part.text)
		if err != nil || !utf8.ValidString(text) {
			return d, fault.Field(field, "must be UTF-8")
		}
		*part.to = text
	}
	n, err := strconv.ParseUint(m[3], 10, 16)
	if err != nil || n == 0 || m[3][0] == '0' {
		return d, fault.Field("port", "is %q, want a number from 1 to 65535", m[3])
	}
	d.port = int(n)
	return d, nil
}

// serve passes a request on, after it is known who makes it. The server of TunnelService decides whether they may.
func (p *ports) serve(w http.ResponseWriter, r *http.Request) {
	a, e := p.api, exchangeOf(r.Context())
	method := tunnelv1.File_fastsandbox_tunnel_v1_tunnel_service_proto.Services().ByName("TunnelService").Methods().ByName("Tunnel")
	e.binding = &route{method: method, upstream: upstream{name: sandboxesName}}
	if r.Method == http.MethodConnect {
		a.writeStatus(r.Context(), w, ownStatus(codes.Unimplemented, r.Method+" is not allowed on "+r.URL.Path), http.StatusMethodNotAllowed)
		return
	}
	d, err := p.destination(r)
	if err == nil && strings.ContainsFunc(r.Header.Get("Upgrade"), func(c rune) bool { return c < ' ' || c > '~' }) {
		err = fault.Field("Upgrade", "must name a protocol")
	}
	if err != nil {
		a.writeError(r.Context(), w, err, 0)
		return
	}
	describe(r.Context(), parameters{namespace: d.namespace, name: d.name})
	if a.config.Sessions != nil && r.Header.Get("Upgrade") != "" {
		a.config.Sessions.Add(1)
		defer a.config.Sessions.Done()
	}
	a.metrics.streams.Inc()
	defer a.metrics.streams.Dec()
	control := http.NewResponseController(w)
	body := &portBody{ReadCloser: r.Body, control: control, api: a, whole: r.ContentLength == 0}
	if r.ContentLength != 0 {
		if r.ProtoMajor == 1 {
			_ = control.EnableFullDuplex() // the server may answer before it has all of the body
		}
		r.Body = body
		defer body.end()
	}
	f := &forwarding{ports: p, destination: d, request: r, exchange: e, body: body}
	proxy := &httputil.ReverseProxy{
		Rewrite: f.rewrite, Transport: f, FlushInterval: -1, ModifyResponse: f.response, ErrorHandler: f.fail,
		ErrorLog: log.New(io.Discard, "", 0), // f.fail and the access log say what it would
	}
	proxy.ServeHTTP(&pacedWriter{w, control, a}, r)
}

// forwarding is one request on its way.
type forwarding struct {
	*ports
	destination
	request  *http.Request
	exchange *exchange
	body     *portBody
}

// rewrite makes the request that the server gets. The credentials of the caller are the gateway's only, and so are the cookies of its host.
func (f *forwarding) rewrite(r *httputil.ProxyRequest) {
	host := net.JoinHostPort("localhost", strconv.Itoa(f.port))
	path, err := url.PathUnescape(f.path)
	if err != nil { // net/url has parsed it before
		path = f.path
	}
	r.Out.URL = &url.URL{Scheme: "http", Host: host, Path: path, RawPath: f.path, RawQuery: r.In.URL.RawQuery, ForceQuery: r.In.URL.ForceQuery}
	r.Out.Host = ""
	r.SetXForwarded()
	r.Out.Header.Set(prefixHeader, f.prefix)
	r.Out.Header.Set(requestIDHeader, f.exchange.requestID)
	for _, name := range []string{"Authorization", "Cookie"} {
		r.Out.Header.Del(name)
	}
}

// RoundTrip implements http.RoundTripper. Each request has a connection of its own, which no other one can get: each is authorized on its own. Without
// the trace of httputil.ReverseProxy, what the server sends before its answer (103) is not passed on: it would get around the checks of its headers.
func (f *forwarding) RoundTrip(r *http.Request) (*http.Response, error) {
	transport := &http.Transport{
		DisableKeepAlives: true, DisableCompression: true, ExpectContinueTimeout: continueTimeout,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			open := func(ctx context.Context) (tunnel.Stream, error) { return f.service.Tunnel(ctx) }
			return tunnel.Dial(ctx, open, f.namespace, f.name, f.port)
		},
	}
	return transport.RoundTrip(r.WithContext(f.request.Context()))
}

// fail answers with an error that came before the answer of the server.
func (f *forwarding) fail(w http.ResponseWriter, r *http.Request, err error) {
	a, ctx := f.api, f.request.Context()
	var failed *readError
	var known interface{ GRPCStatus() *status.Status }
	refused, isRefused := errors.AsType[*tunnel.RefusedError](err)
	code := 0
	switch {
	case errors.As(err, &failed):
		err = failed.refusal()
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case errors.As(err, &known):
		err = known.GRPCStatus().Err()
	case isRefused:
		code, err = http.StatusBadGateway, f.unavailable("nothing accepts connections at port %d of the sandbox: %s", f.port, refused.Error())
	default:
		a.config.Log.V(2).Info("forwarding a request", obs.KeyError, err.Error(), obs.KeyRequestID, f.exchange.requestID)
		code, err = http.StatusBadGateway, f.unavailable("the server at port %d of the sandbox does not answer in HTTP", f.port)
	}
	f.closeUnlessWhole(w.Header())
	var own *runtime.HTTPStatusError
	if errors.As(err, &own) {
		code, err = own.HTTPStatus, own.Err
	}
	a.writeError(ctx, w, err, code)
}

func (f *forwarding) unavailable(format string, args ...any) error {
	return fault.New(errdefs.ErrUnavailable, fault.PortUnavailable, format, args...).With("port", strconv.Itoa(f.port))
}

// closeUnlessWhole has the connection closed after the answer if there is more of the body on it.
func (f *forwarding) closeUnlessWhole(h http.Header) {
	if f.request.ProtoMajor == 1 && !f.body.isWhole() {
		h.Set("Connection", "close")
	}
}

// portBody is the body of a request. Its sender has a minute for each piece.
type portBody struct {
	io.ReadCloser
	control *http.ResponseController
	api     *api

	mu sync.Mutex
	// whole: all of it was read. ended: nothing may be read any longer.
	whole, ended bool
}

// Read implements io.Reader.
func (b *portBody) Read(p []byte) (int, error) {
	b.until(b.api.config.Clock.Now().Add(pieceTimeout))
	n, err := b.ReadCloser.Read(p)
	b.until(time.Time{})
	switch {
	case errors.Is(err, io.EOF):
		b.mu.Lock()
		b.whole = true
		b.mu.Unlock()
	case err != nil:
		err = &readError{err}
	}
	return n, err
}

func (b *portBody) until(t time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.ended {
		_ = b.control.SetReadDeadline(t)
	}
}

func (b *portBody) isWhole() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.whole
}

// end ends a read that waits, and keeps later ones from the deadlines of the next request of the connection.
func (b *portBody) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ended = true
	if !b.whole {
		_ = b.control.SetReadDeadline(time.Unix(1, 0))
	}
}
