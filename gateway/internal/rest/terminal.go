package rest

import (
	"context"
	"encoding/base64"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/coder/websocket"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// terminalPath is the path of the streams of processes. docs/rest.md describes the messages.
	terminalPath = "/v1/namespaces/{namespace}/sandboxes/{name}/terminal"
	// terminalProtocol is the WebSocket subprotocol.
	terminalProtocol = "terminal." + rpc.Domain
	// tokenProtocol begins a subprotocol that is no protocol but a bearer token, in base64url: pages cannot set the headers of a WebSocket.
	tokenProtocol  = "base64url.bearer.authorization." + rpc.Domain + "."
	protocolHeader = "Sec-WebSocket-Protocol"
	// maxFrame is the largest message of a caller: that of the largest input of a process.
	maxFrame = 1 << 20
)

// terminals serves the streams of processes as WebSockets.
type terminals struct {
	api     *api
	service processv1.ProcessServiceClient
}

// newTerminals returns the handler, with its own checks of where a request comes from around those of all requests: a browser lets every page
// open a WebSocket, with the certificate of its user.
func newTerminals(a *api) http.Handler {
	t := &terminals{a, processv1.NewProcessServiceClient(rpc.OnBehalf(a.config.Sandboxes))}
	inner := a.authenticated(t)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.withoutDeadlines(w)
		exchangeOf(r.Context()).route = terminalPath
		if err := a.checkOrigin(r); err != nil {
			a.recordRefusal(r, err)
			a.writeError(r.Context(), w, err, 0)
			return
		}
		if err := tokenFromProtocol(r.Header); err != nil {
			a.recordRefusal(r, err)
			a.writeError(r.Context(), w, err, 0)
			return
		}
		inner.ServeHTTP(w, r)
	})
}

// checkOrigin refuses a page of another site, unless it is allowed. A caller that is no browser sends no origin.
func (a *api) checkOrigin(r *http.Request) error {
	origin := r.Header.Get("Origin")
	if origin == "" || slices.Contains(a.config.Origins, origin) {
		return nil
	}
	if u, err := url.Parse(origin); err == nil && strings.EqualFold(u.Host, r.Host) {
		return nil
	}
	return fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied, "cross-origin requests are not allowed")
}

// tokenFromProtocol makes the token among the subprotocols an ordinary one.
func tokenFromProtocol(h http.Header) error {
	var protocols []string
	token := ""
	for part := range strings.SplitSeq(strings.Join(h.Values(protocolHeader), ","), ",") {
		name := strings.TrimSpace(part)
		encoded, ok := strings.CutPrefix(name, tokenProtocol)
		if !ok {
			protocols = append(protocols, name)
			continue
		}
		raw, err := base64.RawURLEncoding.DecodeString(encoded)
		if err != nil || len(raw) == 0 || token != "" || h.Get("Authorization") != "" {
			return fault.New(errdefs.ErrUnauthenticated, fault.Unauthenticated, "%s must have one bearer token, in base64url without padding, or none", protocolHeader)
		}
		token = string(raw)
	}
	if token == "" {
		return nil
	}
	h.Set("Authorization", "Bearer "+token)
	h.Set(protocolHeader, strings.Join(protocols, ", "))
	return nil
}

// ServeHTTP implements http.Handler.
func (t *terminals) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a := t.api
	ctx, e := r.Context(), exchangeOf(r.Context())
	if r.Method != http.MethodGet {
		w.Header().Set("Allow", http.MethodGet)
		a.writeStatus(ctx, w, ownStatus(codes.Unimplemented, r.Method+" is not allowed on "+r.URL.Path), http.StatusMethodNotAllowed)
		return
	}
	s, err := t.session(r)
	if err == nil {
		err = checkProtocol(r.Header)
	}
	if err != nil {
		a.writeError(ctx, w, err, 0)
		return
	}
	if r.ProtoMajor != 1 || !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		w.Header().Set("Upgrade", "websocket")
		a.writeError(ctx, w, fault.Field("Upgrade", "a terminal is a WebSocket, over HTTP/1.1"), http.StatusUpgradeRequired)
		return
	}
	name := protoreflect.Name("StartProcess")
	if s.start == nil {
		name = "ConnectProcess"
	}
	service := processv1.File_fastsandbox_process_v1_process_service_proto.Services().ByName("ProcessService")
	e.binding = &route{method: service.Methods().ByName(name), upstream: upstream{name: sandboxesName}}
	describe(ctx, s.parameters)
	if a.config.Sessions != nil {
		a.config.Sessions.Add(1)
		defer a.config.Sessions.Done()
	}
	conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{
		Subprotocols: []string{terminalProtocol}, OriginPatterns: a.config.Origins, CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil { // it is answered
		a.config.Log.V(2).Info("upgrading to a WebSocket", obs.KeyError, err.Error())
		return
	}
	a.metrics.streams.Inc()
	defer a.metrics.streams.Dec()
	s.conn = conn
	s.run(context.WithoutCancel(ctx)) // the connection is no longer the server's; the session sees itself when it ends
}

// checkProtocol refuses a caller that offers other protocols only.
func checkProtocol(h http.Header) error {
	offered := h.Values(protocolHeader)
	isOurs := func(name string) bool { return strings.TrimSpace(name) == terminalProtocol }
	if len(offered) > 0 && !slices.ContainsFunc(strings.Split(strings.Join(offered, ","), ","), isOurs) {
		return fault.Field(protocolHeader, "must offer %s", terminalProtocol)
	}
	return nil
}

// session returns the session that a request asks for: of a process to start, if it has a command line, or else of one that runs.
func (t *terminals) session(r *http.Request) (*session, error) {
	s := &session{api: t.api, service: t.service, started: make(chan struct{}), input: make(chan piece, inputQueue)}
	attach := []string{"pid", "tag", "fromOffset", "lossy"}
	start := []string{
		"args[]", "env[]", "clearEnv", "workingDir", "user", "tag", "timeout", "terminal", "rows", "columns", "stdin", "bufferBytes", "lossy", "killOnDisconnect",
	}
	known := attach
	if r.URL.Query().Has("args") {
		known = start
	}
	p, err := parametersOf(r, known...)
	if err != nil {
		return nil, err
	}
	s.parameters = p
	if len(p.lists["args"]) > 0 {
		s.start, err = startOf(p)
	} else {
		s.attach, err = attachOf(p)
	}
	return s, err
}

func attachOf(p parameters) (*processv1.ConnectProcessRequest, error) {
	lossy, err := p.flag("lossy")
	if err != nil {
		return nil, err
	}
	pid, err := p.number("pid", 10, 32)
	if err != nil {
		return nil, err
	}
	from, err := p.number("fromOffset", 10, 64)
	if err != nil {
		return nil, err
	}
	req := &processv1.ConnectProcessRequest{Namespace: p.namespace, Name: p.name, Lossy: lossy}
	if from != nil {
		req.FromOffset = *from
	}
	switch tag := p.text("tag"); {
	case (pid == nil) == (tag == ""):
		return nil, fault.Field("args", "a command line to start, or either pid or tag of a process to attach to, is required")
	case pid != nil:
		req.Process = byPID(int32(*pid))
	default:
		req.Process = &processv1.ProcessSelector{By: &processv1.ProcessSelector_Tag{Tag: tag}}
	}
	return req, nil
}

func byPID(pid int32) *processv1.ProcessSelector {
	return &processv1.ProcessSelector{By: &processv1.ProcessSelector_Pid{Pid: pid}}
}

func startOf(p parameters) (*processv1.StartProcessRequest, error) {
	spec := &processv1.ProcessSpec{Args: p.lists["args"], WorkingDir: p.text("workingDir"), User: p.text("user"), Tag: p.text("tag"), Env: map[string]string{}}
	req := &processv1.StartProcessRequest{Namespace: p.namespace, Name: p.name, Process: spec}
	for _, v := range p.lists["env"] {
		name, value, ok := strings.Cut(v, "=")
		if !ok {
			return nil, fault.Field("env", "%q is not NAME=VALUE", v)
		}
		spec.Env[name] = value
	}
	var plain bool
	for name, flag := range map[string]*bool{
		"clearEnv": &spec.ClearEnv, "stdin": &req.Stdin, "lossy": &req.Lossy, "killOnDisconnect": &req.KillOnDisconnect, "terminal": &plain,
	} {
		var err error
		if *flag, err = p.flag(name); err != nil {
			return nil, err
		}
	}
	plain = p.text("terminal") == "false"
	if v := p.text("timeout"); v != "" {
		d, err := time.ParseDuration(v)
		if err != nil {
			return nil, fault.Field("timeout", "is %q, want a duration such as 1.5s", v)
		}
		spec.Timeout = durationpb.New(d)
	}
	kept, err := p.number("bufferBytes", 10, 64)
	if err != nil {
		return nil, err
	}
	if kept != nil {
		req.BufferBytes = *kept
	}
	size := &processv1.TerminalSize{}
	for name, to := range map[string]*int32{"rows": &size.Rows, "columns": &size.Columns} {
		n, err := p.number(name, 10, 32)
		switch {
		case err != nil:
			return nil, err
		case n != nil && plain:
			return nil, fault.Field(name, "a process without a terminal has none")
		case n != nil:
			*to = int32(*n)
		}
	}
	if !plain {
		req.Terminal = size
	}
	return req, nil
}
