package pki_test

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/pki"
)

var (
	now    = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	nodeIP = net.ParseIP("10.200.0.2")
)

func authority(t *testing.T, dir string, at time.Time) *pki.Authority {
	t.Helper()
	authority, err := pki.EnsureAuthority(dir, "ca", at)
	require.NoError(t, err)
	return authority
}

func leaf(t *testing.T, files pki.Files) *x509.Certificate {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(files.Cert, files.Key)
	require.NoError(t, err)
	return pair.Leaf
}

func TestRole(t *testing.T) {
	dir := t.TempDir()
	ca := authority(t, dir, now)
	files := pki.Files{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key")}
	require.NoError(t, ca.Ensure(files, pki.Role("allocator", nodeIP), now))

	certificate := leaf(t, files)
	require.Equal(t, []string{
		"allocator.fast-sandbox.io", "allocator", "allocator.fast-sandbox-system.svc",
		"allocator.fast-sandbox-system.svc.cluster.local", "localhost",
	}, certificate.DNSNames)
	require.Len(t, certificate.URIs, 1)
	require.Equal(t, "spiffe://fast-sandbox.io/allocator", certificate.URIs[0].String())
	require.Equal(t, x509.ECDSA, certificate.PublicKeyAlgorithm)

	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(ca.PEM))
	for _, usage := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
		for _, name := range []string{"allocator", "localhost", "127.0.0.1", "10.200.0.2"} {
			_, err := certificate.Verify(x509.VerifyOptions{
				Roots: roots, DNSName: name, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage},
			})
			require.NoError(t, err, name)
		}
	}
	info, err := os.Stat(files.Key)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
}

// A certificate that still fits is kept; any other is replaced.
func TestEnsure(t *testing.T) {
	other := pki.Role("agent", nodeIP)
	other.IPs = other.IPs[:1]
	tests := map[string]struct {
		spoil   func(t *testing.T, dir string, files pki.Files)
		subject pki.Subject
		at      time.Time
		kept    bool
	}{
		"unchanged":         {subject: pki.Role("agent", nodeIP), at: now, kept: true},
		"half a year on":    {subject: pki.Role("agent", nodeIP), at: now.AddDate(0, 6, 0), kept: true},
		"near its expiry":   {subject: pki.Role("agent", nodeIP), at: now.AddDate(0, 11, 15)},
		"clock turned back": {subject: pki.Role("agent", nodeIP), at: now.AddDate(0, 0, -1)},
		"other addresses":   {subject: other, at: now},
		"other role":        {subject: pki.Role("gateway", nodeIP), at: now},
		"cut short": {subject: pki.Role("agent", nodeIP), at: now, spoil: func(t *testing.T, _ string, files pki.Files) {
			require.NoError(t, os.Truncate(files.Cert, 100))
		}},
		"key of another": {subject: pki.Role("agent", nodeIP), at: now, spoil: func(t *testing.T, dir string, files pki.Files) {
			raw, err := os.ReadFile(filepath.Join(dir, "ca.key"))
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(files.Key, raw, 0o600))
		}},
		"authority replaced": {subject: pki.Role("agent", nodeIP), at: now, spoil: func(t *testing.T, dir string, _ pki.Files) {
			require.NoError(t, os.Remove(filepath.Join(dir, "ca.key")))
		}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			files := pki.Files{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key")}
			require.NoError(t, authority(t, dir, now).Ensure(files, pki.Role("agent", nodeIP), now))
			before := leaf(t, files)
			if test.spoil != nil {
				test.spoil(t, dir, files)
			}
			ca := authority(t, dir, test.at)
			require.NoError(t, ca.Ensure(files, test.subject, test.at))
			after := leaf(t, files)
			require.Equal(t, test.kept, before.SerialNumber.Cmp(after.SerialNumber) == 0)
			roots := x509.NewCertPool()
			require.True(t, roots.AppendCertsFromPEM(ca.PEM))
			_, err := after.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: test.at})
			require.NoError(t, err)
		})
	}
}

// No certificate outlives its authority.
func TestAuthorityIsReplacedInTime(t *testing.T) {
	dir := t.TempDir()
	first := authority(t, dir, now)
	require.Equal(t, first.PEM, authority(t, dir, now.AddDate(5, 0, 0)).PEM)
	require.NotEqual(t, first.PEM, authority(t, dir, now.AddDate(9, 0, 0)).PEM)
}

func TestEnsureSigningKey(t *testing.T) {
	dir := t.TempDir()
	files := pki.Files{Cert: filepath.Join(dir, "sa.pub"), Key: filepath.Join(dir, "sa.key")}
	read := func() (string, string) {
		public, err := os.ReadFile(files.Cert)
		require.NoError(t, err)
		private, err := os.ReadFile(files.Key)
		require.NoError(t, err)
		return string(public), string(private)
	}
	require.NoError(t, pki.EnsureSigningKey(files))
	public, private := read()
	require.Contains(t, public, "PUBLIC KEY")

	require.NoError(t, os.Remove(files.Cert))
	require.NoError(t, pki.EnsureSigningKey(files))
	againPublic, againPrivate := read()
	require.Equal(t, public, againPublic, "tokens that were signed stay valid")
	require.Equal(t, private, againPrivate)

	require.NoError(t, os.Truncate(files.Key, 10))
	require.NoError(t, pki.EnsureSigningKey(files))
	_, replaced := read()
	require.NotEqual(t, private, replaced)
}
