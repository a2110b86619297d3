package issuer_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/issuer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	id  = rpc.AgentID{Namespace: "ns", Pod: "py-agent-x", UID: "uid"}
)

// authority is a root, and below it the authority of agents, as the local cluster has them.
type authority struct {
	root, cert *x509.Certificate
	key        *ecdsa.PrivateKey
	config     issuer.Config
}

func newAuthority(t *testing.T, life time.Duration) *authority {
	t.Helper()
	dir := t.TempDir()
	file := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	root, rootKey, rootDER := sign(t, &x509.Certificate{Subject: pkix.Name{CommonName: "root"}, IsCA: true, NotAfter: now.Add(1000 * time.Hour)}, nil, nil)
	a := &authority{root: root}
	var der []byte
	a.cert, a.key, der = sign(t, &x509.Certificate{
		Subject: pkix.Name{CommonName: "agents"}, IsCA: true, NotAfter: now.Add(100 * time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		PermittedDNSDomainsCritical: true, PermittedDNSDomains: []string{rpc.AgentDomain}, PermittedURIDomains: []string{rpc.AgentDomain},
	}, root, rootKey)
	keyDER, err := x509.MarshalECPrivateKey(a.key)
	require.NoError(t, err)
	a.config = issuer.Config{
		CertFile: file("ca.crt", "CERTIFICATE", der), KeyFile: file("ca.key", "EC PRIVATE KEY", keyDER), TrustFile: file("trust.crt", "CERTIFICATE", rootDER), Life: life,
	}
	return a
}

// sign signs a certificate, by itself if parent is nil.
func sign(t *testing.T, template, parent *x509.Certificate, by *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template.SerialNumber, template.NotBefore, template.BasicConstraintsValid = big.NewInt(time.Now().UnixNano()), now.Add(-time.Hour), true
	if template.IsCA {
		template.KeyUsage = x509.KeyUsageCertSign
	}
	if parent == nil {
		parent, by = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), by)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return cert, key, der
}

// verify verifies a chain as a peer that trusts the root alone.
func (a *authority) verify(t *testing.T, data map[string][]byte, usage x509.ExtKeyUsage) error {
	t.Helper()
	pair, err := tls.X509KeyPair(data["tls.crt"], data["tls.key"])
	require.NoError(t, err)
	options := x509.VerifyOptions{Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage}, DNSName: rpc.AgentDomain}
	options.Roots.AddCert(a.root)
	for _, der := range pair.Certificate[1:] {
		cert, err := x509.ParseCertificate(der)
		require.NoError(t, err)
		options.Intermediates.AddCert(cert)
	}
	_, err = pair.Leaf.Verify(options)
	return err
}

func leafOf(t *testing.T, data map[string][]byte) *x509.Certificate {
	t.Helper()
	pair, err := tls.X509KeyPair(data["tls.crt"], data["tls.key"])
	require.NoError(t, err)
	return pair.Leaf
}

func TestIssue(t *testing.T) {
	a := newAuthority(t, 24*time.Hour)
	data, err := issuer.New(a.config).Issue(t.Context(), id, now)
	require.NoError(t, err)
	leaf := leafOf(t, data)
	require.Equal(t, "spiffe://agent.fast-sandbox.io/ns/py-agent-x/uid", leaf.URIs[0].String())
	got, ok := rpc.AgentOf(leaf)
	require.True(t, ok)
	require.Equal(t, id, got)
	require.True(t, rpc.HasRole(leaf, rpc.RoleAgent))
	require.Equal(t, now.Add(24*time.Hour), leaf.NotAfter)
	require.NoError(t, a.verify(t, data, x509.ExtKeyUsageServerAuth))
	require.Error(t, a.verify(t, data, x509.ExtKeyUsageClientAuth), "an agent calls no component")
	trust, err := os.ReadFile(a.config.TrustFile)
	require.NoError(t, err)
	require.Equal(t, trust, data["ca.crt"])

	again, err := issuer.New(a.config).Issue(t.Context(), id, now)
	require.NoError(t, err)
	require.NotEqual(t, data["tls.key"], again["tls.key"], "each has a key of its own")
}

// TestAuthorityOfAgentsSignsOnlyAgents: a component with its key can act as an agent, and as no other component and no user.
func TestAuthorityOfAgentsSignsOnlyAgents(t *testing.T) {
	a := newAuthority(t, time.Hour)
	for name, forged := range map[string]*x509.Certificate{
		"role":   {URIs: []*url.URL{{Scheme: "spiffe", Host: rpc.Domain, Path: "/allocator"}}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}},
		"server": {DNSNames: []string{rpc.RoleAllocator.ServerName()}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}},
		"user":   {Subject: pkix.Name{CommonName: "admin", Organization: []string{"system:masters"}}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}},
	} {
		forged.NotAfter = now.Add(time.Hour)
		leaf, _, _ := sign(t, forged, a.cert, a.key)
		options := x509.VerifyOptions{Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(), CurrentTime: now, KeyUsages: forged.ExtKeyUsage}
		options.Roots.AddCert(a.root)
		options.Intermediates.AddCert(a.cert)
		_, err := leaf.Verify(options)
		require.Error(t, err, name)
	}
}

func TestRenewAt(t *testing.T) {
	a, other := newAuthority(t, 30*time.Hour), newAuthority(t, 30*time.Hour)
	i := issuer.New(a.config)
	data, err := i.Issue(t.Context(), id, now)
	require.NoError(t, err)
	foreign, err := issuer.New(other.config).Issue(t.Context(), id, now)
	require.NoError(t, err)
	renewed, err := i.Issue(t.Context(), id, now)
	require.NoError(t, err)
	with := func(key string, value []byte) map[string][]byte {
		out := map[string][]byte{"tls.crt": data["tls.crt"], "tls.key": data["tls.key"], "ca.crt": data["ca.crt"]}
		out[key] = value
		return out
	}
	begin := now.Add(-5 * time.Minute)
	for name, tt := range map[string]struct {
		id   rpc.AgentID
		data map[string][]byte
		want time.Time
	}{
		"after two thirds":       {id, data, begin.Add((30*time.Hour + 5*time.Minute) * 2 / 3)},
		"of another Pod":         {rpc.AgentID{Namespace: "ns", Pod: "py-agent-x", UID: "again"}, data, time.Time{}},
		"of another namespace":   {rpc.AgentID{Namespace: "other", Pod: "py-agent-x", UID: "uid"}, data, time.Time{}},
		"of another authority":   {id, foreign, time.Time{}},
		"with another key":       {id, with("tls.key", renewed["tls.key"]), time.Time{}},
		"trusting another":       {id, with("ca.crt", foreign["ca.crt"]), time.Time{}},
		"cut short":              {id, with("tls.crt", data["tls.crt"][:100]), time.Time{}},
		"of a Secret of another": {id, map[string][]byte{"x": nil}, time.Time{}},
	} {
		got, err := i.RenewAt(tt.id, tt.data)
		require.NoError(t, err, name)
		require.True(t, tt.want.Equal(got), "%s: %s", name, got)
	}
}

func TestAuthorityErrors(t *testing.T) {
	a := newAuthority(t, time.Hour)
	leaf, err := issuer.New(a.config).Issue(t.Context(), id, now)
	require.NoError(t, err)
	leafFile, leafKey := filepath.Join(t.TempDir(), "leaf.crt"), filepath.Join(t.TempDir(), "leaf.key")
	require.NoError(t, os.WriteFile(leafFile, leaf["tls.crt"], 0o600))
	require.NoError(t, os.WriteFile(leafKey, leaf["tls.key"], 0o600))
	for name, tt := range map[string]struct {
		change func(*issuer.Config)
		at     time.Time
		want   string
	}{
		"no certificate":  {func(c *issuer.Config) { c.CertFile = "none" }, now, "reading the authority of agents: open none"},
		"no key":          {func(c *issuer.Config) { c.KeyFile = "none" }, now, "reading the authority of agents: open none"},
		"no trust":        {func(c *issuer.Config) { c.TrustFile = "none" }, now, "reading the authorities of the callers of agents"},
		"another's key":   {func(c *issuer.Config) { c.KeyFile = leafKey }, now, "private key does not match"},
		"no authority":    {func(c *issuer.Config) { c.CertFile, c.KeyFile = leafFile, leafKey }, now, "is not that of an authority"},
		"it has expired":  {func(*issuer.Config) {}, now.Add(200 * time.Hour), "the authority has expired at 2026-01-06T07:04:05Z"},
		"it expires soon": {func(*issuer.Config) {}, now.Add(99*time.Hour + 30*time.Minute), ""},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := a.config
			tt.change(&cfg)
			data, err := issuer.New(cfg).Issue(t.Context(), id, tt.at)
			if tt.want == "" {
				require.NoError(t, err)
				require.Equal(t, a.cert.NotAfter, leafOf(t, data).NotAfter, "no certificate outlives its authority")
				return
			}
			require.ErrorContains(t, err, tt.want)
		})
	}
}
