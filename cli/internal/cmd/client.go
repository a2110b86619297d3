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
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// firstContact is how long a server that has never answered is tried: a wrong address should not cost a minute.
	firstContact = 5 * time.Second
	retryFirst   = 100 * time.Millisecond
	retryMost    = 2 * time.Second
	// pullTries is how often a failed image pull is tried; the allocator has tried more than one agent each time.
	pullTries = 3
)

// connect returns the connection to the allocator, which is made when it is first used.
func (c *cli) connect() (*grpc.ClientConn, error) {
	if c.conn != nil {
		return c.conn, nil
	}
	conn, err := c.dial(c.settings.Addr, rpc.RoleAllocator)
	if err != nil {
		return nil, err
	}
	c.conn = conn
	return conn, nil
}

// dial returns a connection to a server of the role.
func (c *cli) dial(target string, role rpc.Role, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	tls := c.settings.TLS
	if !tls.Insecure && (tls.CertFile == "" || tls.KeyFile == "" || tls.CAFile == "") {
		return nil, fault.New(errdefs.ErrFailedPrecondition, reasonNoIdentity,
			"there is no certificate to show: cacert, cert and key are needed")
	}
	conn, err := rpc.Dial(target, rpc.ClientConfig{TLS: tls, ServerName: role.ServerName(), Options: options})
	if err != nil {
		return nil, fault.New(errdefs.ErrFailedPrecondition, reasonNoIdentity, "%s", err)
	}
	if tls.Insecure {
		c.infof("warning: plaintext connection (--insecure)")
	}
	return conn, nil
}

func (c *cli) sandboxes() (sandboxv1.SandboxServiceClient, error) {
	conn, err := c.connect()
	if err != nil {
		return nil, err
	}
	return sandboxv1.NewSandboxServiceClient(conn), nil
}

func (c *cli) allocator() (allocatorv1.AllocatorServiceClient, error) {
	conn, err := c.connect()
	if err != nil {
		return nil, err
	}
	return allocatorv1.NewAllocatorServiceClient(conn), nil
}

// call carries out one call, within the timeout, again and again while the server is unavailable. The call must be safe to
// repeat: mutations carry a request_id. doing is shown while it takes long.
func call[T any](ctx context.Context, c *cli, doing string, do func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, c.settings.Timeout)
	defer cancel()
	c.progress.start(doing)
	defer c.progress.stop()
	begin, wait, pulls := c.Clock.Now(), retryFirst, 0
	for {
		out, err := do(ctx)
		if err == nil {
			c.connected = true
			return out, nil
		}
		err = c.classify(err)
		if fault.ReasonOf(err) == fault.ImagePullFailed {
			pulls++
		}
		if !errdefs.IsUnavailable(err) || pulls >= pullTries || c.hopeless(err, begin) {
			return out, err
		}
		delay := wait
		if after, ok := fault.RetryAfter(err); ok {
			delay = max(delay, after)
		}
		wait = min(2*wait, retryMost)
		c.progress.start(fmt.Sprintf("%s: %s", doing, err))
		timer := c.Clock.NewTimer(delay)
		select {
		case <-timer.C():
		case <-ctx.Done():
			timer.Stop()
			return out, err // what kept it from working says more than the deadline
		}
	}
}

// hopeless tells whether a server that never answered has been tried long enough.
func (c *cli) hopeless(err error, begin time.Time) bool {
	switch fault.ReasonOf(err) {
	case reasonConnection, tunnel.ReasonCluster, tunnel.ReasonPod:
		return !c.connected && c.Clock.Since(begin) > firstContact
	}
	return false
}

// described finds the core of what gRPC says about a connection.
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

// classify makes a typed error of a call's: the server's own as it is, the connection's with a reason of ours.
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
	case st.Code() == codes.Unavailable && certificateTrouble(text):
		return fault.New(errdefs.ErrPermissionDenied, reasonCertificate, "connecting to %s: %s", server, text)
	case st.Code() == codes.Unavailable && strings.Contains(text, plaintextSign):
		return fault.New(errdefs.ErrFailedPrecondition, reason, "connecting to %s: %s", server, text)
	case st.Code() == codes.Unavailable:
		return fault.New(errdefs.ErrUnavailable, reason, "connecting to %s: %s", server, text)
	case st.Code() == codes.DeadlineExceeded:
		return fault.New(context.DeadlineExceeded, fault.DeadlineExceeded, "the call took longer than its %s", c.settings.Timeout)
	default:
		return rpc.FromStatus(err)
	}
}

// plaintextSign is how TLS says that the other side knows none of it.
const plaintextSign = "first record does not look like a TLS handshake"

func certificateTrouble(text string) bool {
	for _, sign := range []string{"x509:", "certificate", "remote error: tls:"} {
		if strings.Contains(text, sign) {
			return true
		}
	}
	return false
}

// isNotFound tells whether err, from call, means that the thing is not there.
func isNotFound(err error, reason fault.Reason) bool {
	return errdefs.IsNotFound(err) && fault.ReasonOf(err) == reason
}

// interrupted tells whether err comes from the end of ctx, by Ctrl-C.
func interrupted(ctx context.Context, err error) bool {
	return ctx.Err() != nil && errors.Is(ctx.Err(), context.Canceled) && err != nil
}
