// Package caller makes the attempts of hostile callers: a tenant, and strangers, who use the API with what is not theirs. Nothing of it may
// be called concurrently.
package caller

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// callTime bounds one call.
const callTime = 20 * time.Second

// attempt is one attempt of a caller.
type attempt struct {
	name, does, success string
	run                 func(ctx context.Context, s *mesh.Scene, c *gateway) (evidence string, refused error)
	// harmless says that it cannot change the target, which is then not looked at.
	harmless bool
}

// gateway is the REST API for the hostile tenant.
type gateway struct {
	http *http.Client
	url  string
}

func newClient(s *mesh.Scene) (*gateway, error) {
	files := rpc.TLS{CAFile: s.TLS.CAFile}
	cfg, err := files.ClientConfig(rpc.RoleGateway.ServerName())
	if err != nil {
		return nil, err
	}
	return &gateway{&http.Client{Transport: &http.Transport{TLSClientConfig: cfg, ForceAttemptHTTP2: true}}, s.Gateway}, nil
}

// answer is the answer of the gateway.
type answer struct {
	code int
	body string
}

// do sends a request with a token, and with further headers as pairs. Only the beginning of the answer is read.
func (c *gateway) do(ctx context.Context, token, method, path, body string, headers ...string) (answer, error) {
	return c.send(ctx, token, method, path, strings.NewReader(body), headers...)
}

func (c *gateway) send(ctx context.Context, token, method, path string, body io.Reader, headers ...string) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, c.url+path, body)
	if err != nil {
		return answer{}, suite.Brokenf("making a request: %w", err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if len(raw) > 0 {
		err = nil // a stream continues
	}
	return answer{resp.StatusCode, string(raw)}, err
}

// allowed returns evidence unless an answer refuses the caller.
func (a answer) allowed() (string, error) {
	switch a.code {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusBadRequest, http.StatusMethodNotAllowed:
		return "", fmt.Errorf("%d: %.160s", a.code, a.body)
	}
	if a.code >= 500 {
		return "", suite.Brokenf("%d: %.160s", a.code, a.body)
	}
	return fmt.Sprintf("the answer is %d: %.160s", a.code, a.body), nil
}

// allowed returns evidence unless an error refuses the caller and says nothing more.
func allowed(err error) (string, error) {
	switch code := status.Code(err); code {
	case codes.OK:
		return "the call has succeeded", nil
	case codes.PermissionDenied, codes.Unauthenticated, codes.InvalidArgument, codes.Unimplemented:
		return "", err
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return "", suite.Brokenf("calling: %w", err)
	default:
		return fmt.Sprintf("the answer says more than that it is forbidden: %v", err), nil
	}
}

// Run makes all attempts.
func Run(ctx context.Context, s *mesh.Scene) error {
	c, err := newClient(s)
	if err != nil {
		return err
	}
	defer c.http.CloseIdleConnections()
	for _, group := range []struct {
		name     string
		attempts []attempt
	}{
		{"foreign namespace", foreignCalls()}, {"REST", restCalls()}, {"identity", identities()}, {"components", componentCalls()},
		{"replay", replays()}, {"resources", resources()}, {"malformed", malformed()},
	} {
		s.Say("hostile caller: %s", group.name)
		for _, a := range group.attempts {
			evidence, refused := a.make(ctx, s, c)
			s.Log.Made(suite.Attempt{Name: "caller, " + group.name + ": " + a.name, Does: a.does, Success: a.success}, "", evidence, refused)
		}
	}
	return ctx.Err()
}

// make makes the attempt, and looks for what has happened to the target.
func (a attempt) make(ctx context.Context, s *mesh.Scene, c *gateway) (string, error) {
	trying, cancel := context.WithTimeout(ctx, 2*callTime)
	defer cancel()
	evidence, refused := a.run(trying, s, c)
	if a.harmless || evidence != "" {
		return evidence, refused
	}
	if harm := s.Harmed(trying, s.Target); harm != "" {
		return "the sandbox of the other tenant was changed: " + harm, nil
	}
	return "", refused
}
