package pki_test

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/url"
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

// TestRoles: each certificate is of one side and of one role, with no more names than callers use.
func TestRoles(t *testing.T) {
	require.Equal(t, []string{
		"allocator.fast-sandbox.io", "allocator", "allocator.fast-sandbox-system.svc",
		"allocator.fast-sandbox-system.svc.cluster.local", "localhost",
	}, pki.Server("allocator", nodeIP).DNS)
	dir := t.TempDir()
	ca := authority(t, dir, now)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(ca.PEM))
	for name, tt := range map[string]struct {
		subject  pki.Subject
		usage    x509.ExtKeyUsage
		names    []string
		foreign  string
		wantURIs string
	}{
		"allocator":        {pki.Server("allocator", nodeIP), x509.ExtKeyUsageServerAuth, []string{"allocator", "localhost", "127.0.0.1", "10.200.0.2"}, "gateway", "spiffe://fast-sandbox.io/allocator"},
		"janitor":          {pki.Server("janitor", nodeIP), x509.ExtKeyUsageServerAuth, []string{"janitor.fast-sandbox.io"}, "localhost", "spiffe://fast-sandbox.io/janitor"},
		"allocator-client": {pki.Client("allocator"), x509.ExtKeyUsageClientAuth, []string{""}, "allocator.fast-sandbox.io", "spiffe://fast-sandbox.io/allocator"},
		"user":             {pki.User(), x509.ExtKeyUsageClientAuth, []string{""}, "localhost", ""},
	} {
		t.Run(name, func(t *testing.T) {
			files := pki.Files{Cert: filepath.Join(dir, name+".crt"), Key: filepath.Join(dir, name+".key")}
			require.NoError(t, ca.Ensure(files, tt.subject, now))
			certificate := leaf(t, files)
			require.Equal(t, []x509.ExtKeyUsage{tt.usage}, certificate.ExtKeyUsage)
			require.Equal(t, x509.ECDSA, certificate.PublicKeyAlgorithm)
			if tt.wantURIs == "" {
				require.Empty(t, certificate.URIs)
			} else {
				require.Len(t, certificate.URIs, 1)
				require.Equal(t, tt.wantURIs, certificate.URIs[0].String())
			}
			verify := func(name string, usage x509.ExtKeyUsage) error {
				_, err := certificate.Verify(x509.VerifyOptions{Roots: roots, DNSName: name, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage}})
				return err
			}
			for _, name := range tt.names {
				require.NoError(t, verify(name, tt.usage), name)
			}
			require.Error(t, verify(tt.foreign, tt.usage))
			for _, other := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
				if other != tt.usage {
					require.Error(t, verify(tt.names[0], other))
				}
			}
			info, err := os.Stat(files.Key)
			require.NoError(t, err)
			require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
		})
	}
}

// A certificate that still fits is kept; any other is replaced.
func TestEnsure(t *testing.T) {
	other := pki.Server("janitor", nodeIP)
	other.DNS = []string{"elsewhere.fast-sandbox.io"}
	bothSides := pki.Server("janitor", nodeIP)
	bothSides.Side = pki.BothSides
	tests := map[string]struct {
		spoil   func(t *testing.T, dir string, files pki.Files)
		subject pki.Subject
		at      time.Time
		kept    bool
	}{
		"unchanged":         {subject: pki.Server("janitor", nodeIP), at: now, kept: true},
		"half a year on":    {subject: pki.Server("janitor", nodeIP), at: now.AddDate(0, 6, 0), kept: true},
		"near its expiry":   {subject: pki.Server("janitor", nodeIP), at: now.AddDate(0, 11, 15)},
		"clock turned back": {subject: pki.Server("janitor", nodeIP), at: now.AddDate(0, 0, -1)},
		"other names":       {subject: other, at: now},
		"both sides":        {subject: bothSides, at: now},
		"other side":        {subject: pki.Client("janitor"), at: now},
		"other role":        {subject: pki.Server("gateway", nodeIP), at: now},
		"cut short": {subject: pki.Server("janitor", nodeIP), at: now, spoil: func(t *testing.T, _ string, files pki.Files) {
			require.NoError(t, os.Truncate(files.Cert, 100))
		}},
		"key of another": {subject: pki.Server("janitor", nodeIP), at: now, spoil: func(t *testing.T, dir string, files pki.Files) {
			raw, err := os.ReadFile(filepath.Join(dir, "ca.key"))
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(files.Key, raw, 0o600))
		}},
		"authority replaced": {subject: pki.Server("janitor", nodeIP), at: now, spoil: func(t *testing.T, dir string, _ pki.Files) {
			require.NoError(t, os.Remove(filepath.Join(dir, "ca.key")))
		}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			files := pki.Files{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key")}
			require.NoError(t, authority(t, dir, now).Ensure(files, pki.Server("janitor", nodeIP), now))
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
			_, err := after.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: test.at, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
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

// TestServerAuthority: the authority of agents signs servers of its domain, and neither clients nor other names.
func TestServerAuthority(t *testing.T) {
	dir := t.TempDir()
	ca := authority(t, dir, now)
	agents, err := ca.EnsureServerAuthority(dir, pki.AgentAuthority, pki.AgentDomain, now)
	require.NoError(t, err)
	again, err := ca.EnsureServerAuthority(dir, pki.AgentAuthority, pki.AgentDomain, now.AddDate(1, 0, 0))
	require.NoError(t, err)
	require.Equal(t, agents.PEM, again.PEM)
	verify := func(name string, subject pki.Subject, usage x509.ExtKeyUsage) error {
		files := pki.Files{Cert: filepath.Join(dir, name+".crt"), Key: filepath.Join(dir, name+".key")}
		require.NoError(t, agents.Ensure(files, subject, now))
		options := x509.VerifyOptions{Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage}}
		require.True(t, options.Roots.AppendCertsFromPEM(ca.PEM))
		require.True(t, options.Intermediates.AppendCertsFromPEM(agents.PEM))
		_, err := leaf(t, files).Verify(options)
		return err
	}
	uri := func(host, path string) []*url.URL { return []*url.URL{{Scheme: "spiffe", Host: host, Path: path}} }
	agent := pki.Subject{CommonName: "agent", DNS: []string{pki.AgentDomain}, URIs: uri(pki.AgentDomain, "/ns/pod/uid")}
	require.NoError(t, verify("agent", agent, x509.ExtKeyUsageServerAuth))
	require.Error(t, verify("agent", agent, x509.ExtKeyUsageClientAuth))
	require.Error(t, verify("server", pki.Subject{DNS: []string{"allocator.fast-sandbox.io"}}, x509.ExtKeyUsageServerAuth))
	require.Error(t, verify("role", pki.Subject{URIs: uri("fast-sandbox.io", "/allocator")}, x509.ExtKeyUsageServerAuth))

	other, err := pki.EnsureAuthority(t.TempDir(), "ca", now)
	require.NoError(t, err)
	replaced, err := other.EnsureServerAuthority(dir, pki.AgentAuthority, pki.AgentDomain, now)
	require.NoError(t, err)
	require.NotEqual(t, agents.PEM, replaced.PEM, "that of another root is replaced")
}
