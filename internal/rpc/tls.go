package rpc

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
)

// Role is the role of a peer: the path of the URI SAN spiffe://fast-sandbox.io/<role> in its certificate. That of an agent has the trust
// domain AgentDomain.
type Role string

// Roles of components.
const (
	RoleAllocator  Role = "allocator"
	RoleController Role = "controller"
	RoleAgent      Role = "agent"
	RoleGateway    Role = "gateway"
	RoleJanitor    Role = "janitor"
	RoleGC         Role = "gc"
)

// RoleMetrics is that of programs that read metrics and profiles. They may call nothing else.
const RoleMetrics Role = "metrics"

// ServerName returns the DNS name in the certificate of a server of this role.
func (r Role) ServerName() string { return string(r) + "." + Domain }

// TLS names the certificate files of a process. They are read again when they change.
type TLS struct {
	// CertFile and KeyFile are the PEM certificate chain and key of this process; a client that has a token needs none. CAFile holds
	// the authorities that it trusts.
	CertFile, KeyFile, CAFile string
	// ClientCertFile and ClientKeyFile are those of this process as a client, so that each certificate is of one side alone. Empty:
	// CertFile and KeyFile.
	ClientCertFile, ClientKeyFile string
	// Insecure disables TLS.
	Insecure bool
}

// AddFlags adds the flags of t.
func (t *TLS) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&t.CertFile, "tls-cert-file", t.CertFile, "PEM `file` of this process's certificate chain")
	fs.StringVar(&t.KeyFile, "tls-key-file", t.KeyFile, "PEM `file` of this process's private key")
	fs.StringVar(&t.CAFile, "tls-ca-file", t.CAFile, "PEM `file` of the authorities that sign the certificates of peers")
	fs.StringVar(&t.ClientCertFile, "tls-client-cert-file", t.ClientCertFile, "PEM `file` of the certificate chain with which this process calls others; empty: --tls-cert-file")
	fs.StringVar(&t.ClientKeyFile, "tls-client-key-file", t.ClientKeyFile, "PEM `file` of the private key of --tls-client-cert-file")
	fs.BoolVar(&t.Insecure, "insecure", t.Insecure, "use plaintext and accept every caller; only for experiments")
}

// Validate returns every problem, each naming its flag.
func (t TLS) Validate() []error {
	if t.Insecure {
		return nil
	}
	var problems []error
	for _, f := range []struct{ flag, value string }{
		{"tls-cert-file", t.CertFile}, {"tls-key-file", t.KeyFile}, {"tls-ca-file", t.CAFile},
	} {
		if f.value == "" {
			problems = append(problems, fmt.Errorf("--%s is required (or --insecure)", f.flag))
		}
	}
	if (t.ClientCertFile == "") != (t.ClientKeyFile == "") {
		problems = append(problems, errors.New("--tls-client-cert-file and --tls-client-key-file need each other"))
	}
	return problems
}

// asClient returns the files of the process as a client.
func (t TLS) asClient() TLS {
	if t.ClientCertFile != "" {
		t.CertFile, t.KeyFile = t.ClientCertFile, t.ClientKeyFile
	}
	return t
}

// ServerConfig returns the configuration of a server. Components call with a certificate; with users, a client may also come without
// one and has a token.
func (t TLS) ServerConfig(users bool) (*tls.Config, error) {
	files, err := newFiles(t)
	if err != nil {
		return nil, err
	}
	base := &tls.Config{MinVersion: tls.VersionTLS13, ClientAuth: tls.RequireAndVerifyClientCert, NextProtos: []string{"h2", "http/1.1"}}
	if users {
		base.ClientAuth = tls.VerifyClientCertIfGiven
	}
	base.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		cert, pool, err := files.current()
		if err != nil {
			return nil, err
		}
		c := base.Clone()
		c.GetConfigForClient = nil
		c.Certificates, c.ClientCAs = []tls.Certificate{*cert}, pool
		return c, nil
	}
	return base, nil
}

// MetricsConfig returns the configuration of a server of metrics, which clients of RoleMetrics alone may read; nil for plaintext.
func (t TLS) MetricsConfig() (*tls.Config, error) {
	if t.Insecure {
		return nil, nil //nolint:nilnil // nil is plaintext
	}
	cfg, err := t.ServerConfig(false)
	if err != nil {
		return nil, err
	}
	cfg.VerifyConnection = func(s tls.ConnectionState) error {
		if role := roleOf(s.PeerCertificates[0]); role != RoleMetrics {
			return fmt.Errorf("a certificate of role %q may not read metrics", role)
		}
		return nil
	}
	return cfg, nil
}

// ClientConfig returns the configuration of a client that presents its certificate and verifies that the server's is valid
// for serverName, a DNS name or an IP address.
func (t TLS) ClientConfig(serverName string) (*tls.Config, error) {
	return t.clientConfig(serverName, "", "")
}

// clientConfig is ClientConfig that also accepts another name, and verifies that the server is the agent whose Pod has the uid, unless they are
// empty.
func (t TLS) clientConfig(serverName, orName, agentUID string) (*tls.Config, error) {
	if serverName == "" {
		return nil, errors.New("verifying server certificates: no server name")
	}
	files, err := newFiles(t.asClient())
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: serverName,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			cert, _, err := files.current()
			if cert == nil { // the caller has a token
				cert = &tls.Certificate{}
			}
			return cert, err
		},
		// The pool of a tls.Config cannot be replaced later, so VerifyConnection verifies against the current files.
		InsecureSkipVerify: true, //nolint:gosec // verified by VerifyConnection
		VerifyConnection: func(s tls.ConnectionState) error {
			_, pool, err := files.current()
			if err != nil {
				return err
			}
			err = verify(s, pool, serverName)
			if err != nil && orName != "" && verify(s, pool, orName) == nil {
				err = nil
			}
			if err != nil || agentUID == "" {
				return err
			}
			return verifyAgent(s, agentUID)
		},
	}, nil
}

func verify(s tls.ConnectionState, pool *x509.CertPool, serverName string) error {
	if len(s.PeerCertificates) == 0 {
		return errors.New("verifying the server: no certificate presented")
	}
	options := x509.VerifyOptions{Roots: pool, DNSName: serverName, Intermediates: x509.NewCertPool()}
	for _, c := range s.PeerCertificates[1:] {
		options.Intermediates.AddCert(c)
	}
	if _, err := s.PeerCertificates[0].Verify(options); err != nil {
		return fmt.Errorf("verifying the server's certificate: %w", err)
	}
	return nil
}

// Identity is the certificate of a process, that of a server if it has two, and the authorities that it trusts, as its files are at the
// moment. It may be used concurrently.
type Identity struct{ files *files }

// Identity reads the files.
func (t TLS) Identity() (*Identity, error) {
	f, err := newFiles(t)
	if err != nil {
		return nil, err
	}
	return &Identity{f}, nil
}

// Current returns the certificate and the authorities.
func (i *Identity) Current() (*tls.Certificate, *x509.CertPool, error) { return i.files.current() }

// HasRole reports whether a verified certificate is that of a role.
func HasRole(cert *x509.Certificate, role Role) bool { return roleOf(cert) == role }

// roleOf returns the role in a verified certificate, or "".
func roleOf(cert *x509.Certificate) Role {
	if _, ok := AgentOf(cert); ok {
		return RoleAgent
	}
	for _, u := range cert.URIs {
		if isRoleURI(u) {
			return Role(strings.TrimPrefix(u.Path, "/"))
		}
	}
	return ""
}

func isRoleURI(u *url.URL) bool { return u.Scheme == "spiffe" && u.Host == Domain && len(u.Path) > 1 }

// recheck is the least time between two checks of the files.
const recheck = time.Second

// files holds a certificate and a pool and reads them again when their files have changed. While a file is unreadable or
// invalid, the last valid state stays in force: a rotation in progress must not stop a running server.
type files struct {
	tls TLS

	mu      sync.Mutex
	checked time.Time
	stamp   string
	cert    *tls.Certificate
	pool    *x509.CertPool
}

func newFiles(t TLS) (*files, error) {
	f := &files{tls: t}
	stamp, err := f.fingerprint()
	if err != nil {
		return nil, err
	}
	if f.cert, f.pool, err = f.read(); err != nil {
		return nil, err
	}
	f.stamp, f.checked = stamp, time.Now()
	return f, nil
}

func (f *files) current() (*tls.Certificate, *x509.CertPool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if time.Since(f.checked) < recheck {
		return f.cert, f.pool, nil
	}
	f.checked = time.Now()
	stamp, err := f.fingerprint()
	if err != nil || stamp == f.stamp {
		return f.cert, f.pool, nil // the last valid state stays in force
	}
	if cert, pool, err := f.read(); err == nil {
		f.cert, f.pool, f.stamp = cert, pool, stamp
	}
	return f.cert, f.pool, nil
}

func (f *files) fingerprint() (string, error) {
	var b strings.Builder
	for _, name := range []string{f.tls.CertFile, f.tls.KeyFile, f.tls.CAFile} {
		if name == "" {
			continue
		}
		info, err := os.Stat(name)
		if err != nil {
			return "", fmt.Errorf("reading certificates: %w", err)
		}
		fmt.Fprintf(&b, "%s %d %d;", name, info.Size(), info.ModTime().UnixNano())
	}
	return b.String(), nil
}

func (f *files) read() (*tls.Certificate, *x509.CertPool, error) {
	var cert *tls.Certificate
	if f.tls.CertFile != "" || f.tls.KeyFile != "" {
		pair, err := tls.LoadX509KeyPair(f.tls.CertFile, f.tls.KeyFile)
		if err != nil {
			return nil, nil, fmt.Errorf("reading certificate %s: %w", f.tls.CertFile, err)
		}
		cert = &pair
	}
	raw, err := os.ReadFile(f.tls.CAFile)
	if err != nil {
		return nil, nil, fmt.Errorf("reading authorities: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(raw) {
		return nil, nil, fmt.Errorf("reading authorities %s: no PEM certificate found", f.tls.CAFile)
	}
	return cert, pool, nil
}
