package auth_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// issuer is an authority with one certificate.
type issuer struct {
	roots *x509.CertPool
	key   crypto.Signer
	chain [][]byte
}

func newIssuer(t *testing.T, key crypto.Signer, name string) issuer {
	t.Helper()
	root, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
		NotBefore: keyTime.Add(-time.Hour), NotAfter: keyTime.Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, ca, ca, root.Public(), root)
	require.NoError(t, err)
	ca, err = x509.ParseCertificate(der)
	require.NoError(t, err)
	leaf, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, NotBefore: keyTime.Add(-time.Hour), NotAfter: keyTime.Add(time.Hour),
	}, ca, key.Public(), root)
	require.NoError(t, err)
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	return issuer{roots, key, [][]byte{leaf}}
}

func ecKey(t *testing.T) crypto.Signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	return key
}

func isAllocator(c *x509.Certificate) bool { return c.Subject.CommonName == "allocator" }

var ticket = auth.Ticket{User: "alice", Method: "/s/M", AgentUID: "a", SandboxUID: "s", Attempt: 2, Expires: keyTime.Add(auth.TicketLife)}

func TestTicket(t *testing.T) {
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	_, edKey, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	for name, key := range map[string]crypto.Signer{"ECDSA": ecKey(t), "RSA": rsaKey, "Ed25519": edKey} {
		t.Run(name, func(t *testing.T) {
			i := newIssuer(t, key, "allocator")
			text, err := ticket.Sign(i.key, i.chain)
			require.NoError(t, err)
			require.True(t, auth.IsTicket(text))
			got, err := auth.ReadTicket(text, i.roots, isAllocator, keyTime)
			require.NoError(t, err)
			require.Equal(t, ticket, got)
		})
	}
}

func TestTicketsThatAreRefused(t *testing.T) {
	i := newIssuer(t, ecKey(t), "allocator")
	sign := func(i issuer, ticket auth.Ticket) string {
		text, err := ticket.Sign(i.key, i.chain)
		require.NoError(t, err)
		return text
	}
	good := sign(i, ticket)
	body, signature, _ := strings.Cut(good, ".")
	raw, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(body, "fsbt_"))
	require.NoError(t, err)
	forged := "fsbt_" + base64.RawURLEncoding.EncodeToString([]byte(strings.Replace(string(raw), `"s"`, `"x"`, 1))) + "." + signature
	stranger := newIssuer(t, ecKey(t), "allocator")
	stolen := issuer{i.roots, ecKey(t), i.chain} // the chain is public, the key is not
	later := ticket
	later.Expires = keyTime.Add(time.Hour)
	for name, test := range map[string]struct {
		text    string
		now     time.Time
		trusted func(*x509.Certificate) bool
	}{
		"after its end":                      {good, ticket.Expires, isAllocator},
		"it would be valid for too long":     {sign(i, later), keyTime, isAllocator},
		"another sandbox":                    {forged, keyTime, isAllocator},
		"of another authority":               {sign(stranger, ticket), keyTime, isAllocator},
		"signed with another key":            {sign(stolen, ticket), keyTime, isAllocator},
		"signed by another component":        {good, keyTime, func(*x509.Certificate) bool { return false }},
		"the certificate of the signer ends": {good, keyTime.Add(2 * time.Hour), isAllocator},
		"without a signature":                {body, keyTime, isAllocator},
		"without a chain":                    {sign(issuer{i.roots, i.key, nil}, ticket), keyTime, isAllocator},
		"a chain that is none":               {sign(issuer{i.roots, i.key, [][]byte{{1}}}, ticket), keyTime, isAllocator},
		"not base64":                         {"fsbt_%%%.%%%", keyTime, isAllocator},
		"empty":                              {"", keyTime, isAllocator},
		"too long":                           {good + strings.Repeat("a", 33<<10), keyTime, isAllocator},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := auth.ReadTicket(test.text, i.roots, test.trusted, test.now)
			require.Equal(t, fault.Unauthenticated, fault.ReasonOf(err), "%v", err)
		})
	}
}
