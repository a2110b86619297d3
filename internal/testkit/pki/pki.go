// Package pki issues certificates for mutual TLS in tests: one authority, and from it a certificate for each
// role, on disk as the real components read them. An Authority must not be used concurrently.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Authority issues certificates into a directory.
type Authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// New makes an authority in a directory that is removed with the test.
func New(t testing.TB) *Authority {
	t.Helper()
	a, err := Make(t.TempDir())
	require.NoError(t, err)
	return a
}

// TLS is Issue for a test.
func (a *Authority) TLS(t testing.TB, role rpc.Role) rpc.TLS {
	t.Helper()
	files, err := a.Issue(role)
	require.NoError(t, err)
	return files
}

// Make makes an authority in a directory, for programs that are not tests. Its certificates are valid for an hour.
func Make(dir string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making an authority: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("making an authority: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("making an authority: %w", err)
	}
	return &Authority{dir: dir, cert: cert, key: key}, write(filepath.Join(dir, "ca.crt"), "CERTIFICATE", der)
}

// Issue issues the certificates of a role, as real components have them: one of a server alone, for its server name, localhost and
// 127.0.0.1, and one of a client alone. It returns their files. Issuing the same role again replaces them.
func (a *Authority) Issue(role rpc.Role) (rpc.TLS, error) {
	uris := []*url.URL{{Scheme: "spiffe", Host: rpc.Domain, Path: "/" + string(role)}}
	server, err := a.issue(string(role), &x509.Certificate{
		Subject: pkix.Name{CommonName: string(role)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: []string{role.ServerName(), "localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, URIs: uris,
	})
	if err != nil {
		return rpc.TLS{}, err
	}
	client, err := a.issue(string(role)+"-client", &x509.Certificate{
		Subject: pkix.Name{CommonName: string(role)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, URIs: uris,
	})
	server.ClientCertFile, server.ClientKeyFile = client.CertFile, client.KeyFile
	return server, err
}

// IssueAgent issues the certificate of an agent, as the controller does: of a server alone.
func (a *Authority) IssueAgent(id rpc.AgentID) (rpc.TLS, error) {
	return a.issue("agent-"+id.UID, &x509.Certificate{
		Subject: pkix.Name{CommonName: rpc.AgentDomain}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: []string{rpc.AgentDomain}, URIs: []*url.URL{id.URI()},
	})
}

// Agent is IssueAgent for a test.
func (a *Authority) Agent(t testing.TB, id rpc.AgentID) rpc.TLS {
	t.Helper()
	files, err := a.IssueAgent(id)
	require.NoError(t, err)
	return files
}

// IssueUser issues a client certificate of a user with groups.
func (a *Authority) IssueUser(name string, groups ...string) (rpc.TLS, error) {
	return a.issue("user-"+name, &x509.Certificate{
		Subject: pkix.Name{CommonName: name, Organization: groups}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
}

// User is IssueUser for a test.
func (a *Authority) User(t testing.TB, name string, groups ...string) rpc.TLS {
	t.Helper()
	files, err := a.IssueUser(name, groups...)
	require.NoError(t, err)
	return files
}

func (a *Authority) issue(name string, template *x509.Certificate) (rpc.TLS, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return rpc.TLS{}, fmt.Errorf("issuing a certificate of %s: %w", name, err)
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, big.NewInt(1<<62)); err != nil {
		return rpc.TLS{}, fmt.Errorf("issuing a certificate of %s: %w", name, err)
	}
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Minute), time.Now().Add(time.Hour)
	template.KeyUsage = x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return rpc.TLS{}, fmt.Errorf("issuing a certificate of %s: %w", name, err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return rpc.TLS{}, fmt.Errorf("issuing a certificate of %s: %w", name, err)
	}
	files := rpc.TLS{
		CertFile: filepath.Join(a.dir, name+".crt"), KeyFile: filepath.Join(a.dir, name+".key"),
		CAFile: filepath.Join(a.dir, "ca.crt"),
	}
	return files, errors.Join(write(files.CertFile, "CERTIFICATE", der), write(files.KeyFile, "EC PRIVATE KEY", keyDER))
}

func write(path, kind string, der []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
