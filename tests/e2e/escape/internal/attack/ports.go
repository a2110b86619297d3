package attack

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// ports are the ports that a sandbox can reach. A connection to them is closed by the issue of the network; an answer to a stranger must
// be refused already.
func ports() []Attack {
	known := func(of func(*Env) string) func(*Env) (string, error) {
		return func(e *Env) (string, error) {
			if of(e) == "" {
				return "", suite.Brokenf("the address is not known")
			}
			return of(e), nil
		}
	}
	places := []struct {
		name, does string
		of         func(*Env) (string, error)
	}{
		{"the agent", "its agent's port", known(func(e *Env) string { return e.Agent })},
		{"the kubelet", "the kubelet's port", known(func(e *Env) string { return e.Kubelet })},
		{"the API server", "the API server's port", known(func(e *Env) string { return e.APIServer })},
		{"the allocator", "the allocator's port", known(func(e *Env) string { return e.Allocator })},
		{"the gateway", "the gateway's port", known(func(e *Env) string { return e.Gateway })},
		{"a neighbor", "a port of a sandbox of another tenant", known(func(e *Env) string { return e.Neighbor })},
		{"a roommate", "a port of another sandbox of its agent", known(func(e *Env) string { return e.Roommate })},
		{"the metadata service", "the address at which clouds give credentials to a node", known(func(e *Env) string { return e.Metadata })},
	}
	var out []Attack
	for _, p := range places {
		out = append(out, Attack{
			Attempt: suite.Attempt{Name: "ports: reach " + p.name, Does: "connects to " + p.does, Success: "it is connected", Expected: suite.Network},
			Once:    true, Unprovable: unprovableHere, NeedsRoommate: p.name == "a roommate",
			run: func(e *Env) (string, error) {
				to, err := p.of(e)
				if err != nil {
					return "", err
				}
				return connect(to)
			},
		})
	}
	return append(out,
		answer("health of the agent", "asks the port that agents had for probes of the kubelet", func(e *Env, c *client) (string, error) {
			return c.grpc("http://"+e.Health, "/grpc.health.v1.Health/Check", "")
		}),
		answer("agent", "watches the agent's sandboxes", func(e *Env, c *client) (string, error) {
			return c.grpc("https://"+e.Agent, "/fastsandbox.agent.v1.AgentService/WatchStatus", "")
		}),
		answer("reflection of the agent", "asks the agent for its services", func(e *Env, c *client) (string, error) {
			return c.grpc("https://"+e.Agent, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", listServices)
		}),
		answer("metrics of the agent", "reads metrics and profiles", func(e *Env, c *client) (string, error) {
			return first([]string{"/metrics", "/debug/pprof/", "/debug/pprof/heap"}, func(path string) (string, error) {
				return first([]string{"https://", "http://"}, func(scheme string) (string, error) { return c.get(scheme + e.Metrics + path) })
			})
		}),
		answer("kubelet", "lists the Pods of the node, and reads its logs", func(e *Env, c *client) (string, error) {
			return first([]string{"/pods", "/logs/", "/metrics", "/configz"}, func(path string) (string, error) { return c.get("https://" + e.Kubelet + path) })
		}),
		answer("API server", "lists Secrets, Pods and Sandboxes", func(e *Env, c *client) (string, error) {
			return first([]string{"/api/v1/secrets", "/api/v1/pods", "/apis/fast-sandbox.io/v1alpha1/sandboxes"}, func(path string) (string, error) {
				return c.get("https://" + e.APIServer + path)
			})
		}),
		answer("allocator", "lists the sandboxes of all tenants", func(e *Env, c *client) (string, error) {
			return c.grpc("https://"+e.Allocator, "/fastsandbox.sandbox.v1.SandboxService/ListSandboxes", "")
		}),
		answer("reflection of the allocator", "asks the allocator for its services", func(e *Env, c *client) (string, error) {
			return c.grpc("https://"+e.Allocator, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", listServices)
		}),
		answer("gateway", "lists the sandboxes of all tenants", func(e *Env, c *client) (string, error) { return c.get("https://" + e.Gateway + "/v1/sandboxes") }),
	)
}

const unprovableHere = "the open container has no addresses of a sandbox; a unit test has an open port"

// answer is an attack that asks a port without a certificate, and with one that it has made itself.
func answer(name, does string, ask func(*Env, *client) (string, error)) Attack {
	return Attack{
		Attempt: suite.Attempt{Name: "ports: answer of " + name, Does: does + ", without a certificate and with one of its own making", Success: "the request is answered"},
		Once:    true, Unprovable: unprovableHere,
		run: func(e *Env) (string, error) {
			return first([]bool{false, true}, func(certificate bool) (string, error) {
				c, err := newClient(certificate)
				if err != nil {
					return "", suite.Brokenf("making a client: %w", err)
				}
				defer c.http.CloseIdleConnections()
				return ask(e, c)
			})
		},
	}
}

func connect(address string) (string, error) {
	conn, err := net.DialTimeout("tcp", address, timeout)
	if err != nil {
		return "", err
	}
	_ = conn.Close()
	return "connected to " + address, nil
}

// client asks a server that it does not verify.
type client struct{ http *http.Client }

func newClient(certificate bool) (*client, error) {
	cfg := &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}
	if certificate {
		own, err := SelfSigned("allocator")
		if err != nil {
			return nil, err
		}
		// Also to a server that names other authorities.
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &own, nil }
	}
	var protocols http.Protocols
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	protocols.SetHTTP1(true)
	return &client{&http.Client{Transport: &http.Transport{TLSClientConfig: cfg, Protocols: &protocols}}}, nil
}

func (c *client) get(address string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return "", suite.Brokenf("asking: %w", err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	raw, _ := io.ReadAll(io.LimitReader(resp.Body, 200))
	if resp.StatusCode >= 200 && resp.StatusCode < 300 {
		return fmt.Sprintf("%s: %s: %.80q", address, resp.Status, raw), nil
	}
	return "", fmt.Errorf("%s: %.80q", resp.Status, raw)
}

// listServices is a request for reflection.
const listServices = "\x3a\x01*"

// grpc makes a call with one message, shorter than 256 bytes. It is answered if the server sends a message, or the status OK.
func (c *client) grpc(server, method, message string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, server+method, strings.NewReader("\x00\x00\x00\x00"+string([]byte{byte(len(message))})+message))
	if err != nil {
		return "", suite.Brokenf("asking: %w", err)
	}
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("TE", "trailers")
	protocols := &http.Protocols{}
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	transport := c.http.Transport.(*http.Transport).Clone()
	transport.Protocols = protocols
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	frame := make([]byte, 5)
	n, err := io.ReadFull(resp.Body, frame)
	if n == len(frame) {
		return method + " of " + server + " has sent a message", nil
	}
	code, reason := grpcStatus(resp)
	switch code {
	case "0":
		return method + " of " + server + " is answered", nil
	case "":
		return "", fmt.Errorf("no status: %s: %w", resp.Status, err)
	}
	return "", fmt.Errorf("gRPC code %s: %s", code, reason)
}

func grpcStatus(resp *http.Response) (code, message string) {
	for _, h := range []http.Header{resp.Trailer, resp.Header} {
		if c := h.Get("Grpc-Status"); c != "" {
			return c, h.Get("Grpc-Message")
		}
	}
	return "", ""
}

// SelfSigned returns a certificate that claims to be a component's, and that no authority has signed.
func SelfSigned(role string) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	names := []string{role + ".fast-sandbox.io"}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "system:" + role, Organization: []string{"system:masters"}},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), DNSNames: names,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		URIs:        []*url.URL{{Scheme: "spiffe", Host: "fast-sandbox.io", Path: "/" + role}},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
