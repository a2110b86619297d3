package cmd

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// firstContact bounds the attempts to reach a server that has never answered, so that a wrong address is reported soon.
	firstContact = 5 * time.Second
	// maxPulls is how often a failed image pull is repeated. The allocator tries several agents each time.
	maxPulls = 3
)

// retries returns the delays between the attempts of a call. They stay short: servers that restart are back within seconds.
func retries() backoff.Policy {
	return backoff.Policy{Initial: 100 * time.Millisecond, Max: time.Second}
}

// connect returns the connection to the gateway, or to an allocator, which does not serve calls into sandboxes. The first call creates it.
func (c *cli) connect() (*grpc.ClientConn, error) { return c.connectFor(false) }

// connectFor does the same for a command that works with files.
func (c *cli) connectFor(files bool) (*grpc.ClientConn, error) {
	if c.conn != nil {
		return c.conn, nil
	}
	conn, err := c.dial(c.settings.Addr, remote{role: rpc.RoleGateway, orRole: rpc.RoleAllocator, files: files})
	if err != nil {
		return nil, err
	}
	c.conn = conn
	return conn, nil
}

// dial returns a connection to a server.
func (c *cli) dial(target string, r remote, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	cfg := rpc.ClientConfig{TLS: c.settings.TLS, ServerName: r.role.ServerName(), AgentUID: r.agentUID, Silence: rpc.DefaultSilence, Bulk: true, Files: r.files, Options: options}
	if r.orRole != "" {
		cfg.OrName = r.orRole.ServerName()
	}
	switch tls := &cfg.TLS; {
	case tls.Insecure:
	case tls.CAFile == "" || !c.settings.HasToken() && (tls.CertFile == "" || tls.KeyFile == ""):
		return nil, fault.New(errdefs.ErrFailedPrecondition, reasonNoIdentity, "no credentials: cacert is required, and cert and key or a token")
	case r.ticket != nil:
		cfg.Token, tls.CertFile, tls.KeyFile = r.ticket, "", ""
	case c.settings.HasToken():
		cfg.Token = c.settings.Token
	}
	conn, err := rpc.Dial(target, cfg)
	if err != nil {
		return nil, fault.New(errdefs.ErrFailedPrecondition, reasonNoIdentity, "%s", err)
	}
	if cfg.TLS.Insecure {
		c.infof("warning: plaintext connection (--insecure)")
	}
	return conn, nil
}

// sandboxes returns a client of the public API.
func (c *cli) sandboxes() (sandboxv1.SandboxServiceClient, error) {
	conn, err := c.connect()
	if err != nil {
		return nil, err
	}
	return sandboxv1.NewSandboxServiceClient(conn), nil
}

// allocator returns a client of the allocator's API.
func (c *cli) allocator() (allocatorv1.AllocatorServiceClient, error) {
	conn, err := c.connect()
	if err != nil {
		return nil, err
	}
	return allocatorv1.NewAllocatorServiceClient(conn), nil
}

// call makes one call, within the timeout, and repeats it while the server is unavailable. The call must be safe to repeat:
// mutations carry a request_id. The progress line shows doing if the call takes long.
func call[T any](ctx context.Context, c *cli, doing string, do func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, c.settings.Timeout)
	defer cancel()
	c.progress.start(doing)
	defer c.progress.stop()
	begin, delays, pulls := c.Clock.Now(), backoff.New(c.Clock, retries()), 0
	var last error
	for {
		attempt := c.Clock.Now()
		out, err := do(ctx)
		if err == nil {
			c.connected = true
			return out, nil
		}
		err = c.classify(err)
		// The last error explains more than the deadline, unless most of the time was spent in this attempt.
		if last != nil && errors.Is(err, context.DeadlineExceeded) && c.Clock.Since(attempt) < attempt.Sub(begin) {
			return out, last
		}
		if fault.ReasonOf(err) == fault.ImagePullFailed {
			pulls++
		}
		if !errdefs.IsUnavailable(err) || pulls >= maxPulls || c.hopeless(err, begin) {
			return out, err
		}
		delay := delays.Next()
		if after, ok := fault.RetryAfter(err); ok {
			delay = max(delay, after)
		}
		c.progress.start(fmt.Sprintf("%s: %s", doing, err))
		timer := c.Clock.NewTimer(delay)
		select {
		case <-timer.C():
		case <-ctx.Done():
			timer.Stop()
			return out, err
		}
		last = err
	}
}

// hopeless reports whether a server that has never answered was called for long enough.
func (c *cli) hopeless(err error, begin time.Time) bool {
	switch fault.ReasonOf(err) {
	case reasonConnection, tunnel.ReasonCluster, tunnel.ReasonPod:
		return !c.connected && c.Clock.Since(begin) > firstContact
	}
	return false
}

// described returns the cause in an error text of gRPC about a connection.
func described(text string) string {
	if m := regexp.MustCompile(`desc = ("(?:[^"\\]|\\.)*")`).FindStringSubmatch(text); m != nil {
		if s, err := strconv.Unquote(m[1]); err == nil {
			text = s
		}
	}
	for _, prefix := range []string{"connection error: ", "transport: ", "Error while dialing: ", "authentication handshake failed: "} {
		text = strings.TrimPrefix(text, prefix)
	}
	return text
}

// classify converts the error of a call: an error of the server keeps its reason, one of the connection gets a reason of fsb-ctl.
func (c *cli) classify(err error) error {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		return err
	}
	for _, d := range st.Details() {
		if _, ok := d.(*errdetails.ErrorInfo); ok {
			c.connected = true
			return rpc.FromStatus(err)
		}
	}
	text := described(st.Message())
	server, reason := c.settings.Addr, reasonConnection
	if c.peer != "" {
		server, reason = c.peer, tunnel.ReasonPod
	}
	switch {
	case st.Code() == codes.Unavailable && isCertificateError(text):
		return fault.New(errdefs.ErrPermissionDenied, reasonCertificate, "connecting to %s: %s", server, text)
	case st.Code() == codes.Unavailable && strings.Contains(text, plaintextSign):
		return fault.New(errdefs.ErrFailedPrecondition, reason, "connecting to %s: %s", server, text)
	case st.Code() == codes.Unavailable:
		return fault.New(errdefs.ErrUnavailable, reason, "connecting to %s: %s", server, text)
	case st.Code() == codes.DeadlineExceeded:
		return fault.New(context.DeadlineExceeded, fault.DeadlineExceeded, "the call did not end within %s", c.settings.Timeout)
	default:
		return rpc.FromStatus(err)
	}
}

// plaintextSign is the error text of crypto/tls for a peer without TLS.
const plaintextSign = "first record does not look like a TLS handshake"

// isCertificateError reports whether an error text of a connection is about a certificate.
func isCertificateError(text string) bool {
	for _, sign := range []string{"x509:", "certificate", "remote error: tls:"} {
		if strings.Contains(text, sign) {
			return true
		}
	}
	return false
}

// isNotFound reports whether err, from call, means that the object does not exist.
func isNotFound(err error, reason fault.Reason) bool {
	return errdefs.IsNotFound(err) && fault.ReasonOf(err) == reason
}

// interrupted reports whether err is a consequence of Ctrl-C.
func interrupted(ctx context.Context, err error) bool {
	return ctx.Err() != nil && errors.Is(ctx.Err(), context.Canceled) && err != nil
}
