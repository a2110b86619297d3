// Package pki issues the certificates that tests run mutual TLS with: one authority, and from it a certificate for each
// role, on disk as the real components read them.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
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

// Authority issues certificates into a folder that goes with the test.
type Authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// New makes an authority.
func New(t testing.TB) *Authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	a := &Authority{dir: t.TempDir(), cert: cert, key: key}
	write(t, filepath.Join(a.dir, "ca.crt"), "CERTIFICATE", der)
	return a
}

// TLS issues a certificate of the role, for its server name, localhost and 127.0.0.1, and returns its files. Issuing the
// same role again replaces them.
func (a *Authority) TLS(t testing.TB, role rpc.Role) rpc.TLS {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: string(role)},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:    []string{role.ServerName(), "localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		URIs: []*url.URL{{Scheme: "spiffe", Host: rpc.Domain, Path: "/" + string(role)}},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	require.NoError(t, err)
	keyDER, err := x509.MarshalECPrivateKey(key)
	require.NoError(t, err)
	files := rpc.TLS{
		CertFile: filepath.Join(a.dir, string(role)+".crt"), KeyFile: filepath.Join(a.dir, string(role)+".key"),
		CAFile: filepath.Join(a.dir, "ca.crt"),
	}
	write(t, files.CertFile, "CERTIFICATE", der)
	write(t, files.KeyFile, "EC PRIVATE KEY", keyDER)
	return files
}

func write(t testing.TB, path, kind string, der []byte) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
}
