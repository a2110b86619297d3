package certmanager_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/certmanager"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	id  = rpc.AgentID{Namespace: "ns", Pod: "py-agent-x", UID: "uid"}
)

// signer is cert-manager with an authority.
type signer struct {
	t      *testing.T
	client client.Client
	cert   *x509.Certificate
	key    *ecdsa.PrivateKey
	trust  string
	serial int64
	// change changes what is signed; nil for nothing.
	change func(*x509.Certificate)
}

func newSigner(t *testing.T) *signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "agents"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(1000 * time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	s := &signer{t: t, client: fake.NewClientBuilder().WithScheme(runtime.NewScheme()).Build(), key: key, trust: filepath.Join(t.TempDir(), "ca.crt"), serial: 1}
	s.cert, err = x509.ParseCertificate(der)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(s.trust, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	return s
}

// requests returns a controller's Requests; each is one that has just started.
func (s *signer) requests() *certmanager.Requests {
	return certmanager.New(certmanager.Config{Client: s.client, Live: s.client, Kind: "ClusterIssuer", Name: "agents", TrustFile: s.trust, Life: 24 * time.Hour})
}

// request returns the CertificateRequest; nil if there is none.
func (s *signer) request() *unstructured.Unstructured {
	s.t.Helper()
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(schema.GroupVersionKind{Group: "cert-manager.io", Version: "v1", Kind: "CertificateRequest"})
	err := s.client.Get(s.t.Context(), types.NamespacedName{Namespace: "ns", Name: "py-agent-x-tls"}, o)
	if apierrors.IsNotFound(err) {
		return nil
	}
	require.NoError(s.t, err)
	return o
}

// csr returns the signing request in a CertificateRequest.
func (s *signer) csr(o *unstructured.Unstructured) *x509.CertificateRequest {
	s.t.Helper()
	text, _, err := unstructured.NestedString(o.Object, "spec", "request")
	require.NoError(s.t, err)
	raw, err := base64.StdEncoding.DecodeString(text)
	require.NoError(s.t, err)
	block, _ := pem.Decode(raw)
	require.Equal(s.t, "CERTIFICATE REQUEST", block.Type)
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	require.NoError(s.t, err)
	require.NoError(s.t, csr.CheckSignature())
	return csr
}

// sign fulfills the CertificateRequest.
func (s *signer) sign() {
	s.t.Helper()
	o := s.request()
	csr := s.csr(o)
	s.serial++
	template := &x509.Certificate{
		SerialNumber: big.NewInt(s.serial), Subject: csr.Subject, DNSNames: csr.DNSNames, URIs: csr.URIs, NotBefore: now, NotAfter: now.Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, PublicKey: csr.PublicKey,
	}
	if s.change != nil {
		s.change(template)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, s.cert, template.PublicKey, s.key)
	require.NoError(s.t, err)
	s.answer(o, map[string]any{"type": "Ready", "status": "True", "reason": "Issued"}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func (s *signer) answer(o *unstructured.Unstructured, condition map[string]any, certificate []byte) {
	s.t.Helper()
	o.Object["status"] = map[string]any{"conditions": []any{condition}, "certificate": base64.StdEncoding.EncodeToString(certificate)}
	require.NoError(s.t, s.client.Update(s.t.Context(), o))
}

// TestIssue: the certificate is requested once for a Pod, and the request goes with the answer.
func TestIssue(t *testing.T) {
	s := newSigner(t)
	r := s.requests()
	for range 2 {
		data, err := r.Issue(t.Context(), id, now)
		require.NoError(t, err)
		require.Nil(t, data)
	}
	o := s.request()
	require.Equal(t, []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "py-agent-x", UID: "uid", Controller: ptr.To(true)}}, o.GetOwnerReferences())
	spec := o.Object["spec"].(map[string]any)
	delete(spec, "request")
	require.Equal(t, map[string]any{
		"duration": "24h0m0s", "isCA": false, "usages": []any{"digital signature", "server auth"},
		"issuerRef": map[string]any{"group": "cert-manager.io", "kind": "ClusterIssuer", "name": "agents"},
	}, spec)
	csr := s.csr(s.request())
	require.Equal(t, []string{rpc.AgentDomain}, csr.DNSNames)
	require.Equal(t, id.URI(), csr.URIs[0])
	s.sign()
	data, err := r.Issue(t.Context(), id, now)
	require.NoError(t, err)
	require.Nil(t, s.request())
	pair, err := tls.X509KeyPair(data["tls.crt"], data["tls.key"])
	require.NoError(t, err)
	got, ok := rpc.AgentOf(pair.Leaf)
	require.True(t, ok)
	require.Equal(t, id, got)
	trust, err := os.ReadFile(s.trust)
	require.NoError(t, err)
	require.Equal(t, trust, data["ca.crt"])
	at, err := r.RenewAt(id, data)
	require.NoError(t, err)
	require.True(t, now.Add(16*time.Hour).Equal(at), "%s", at)
}

// TestRequestsOfOthers: a request that was there first, or whose key was lost with a controller, is replaced and never used.
func TestRequestsOfOthers(t *testing.T) {
	for name, first := range map[string]func(s *signer){
		"of a controller that has ended": func(s *signer) {
			_, err := s.requests().Issue(s.t.Context(), id, now)
			require.NoError(s.t, err)
			s.sign()
		},
		"of a user": func(s *signer) {
			o := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"request": "bm9uZQ=="}}}
			o.SetGroupVersionKind(schema.GroupVersionKind{Group: "cert-manager.io", Version: "v1", Kind: "CertificateRequest"})
			o.SetNamespace("ns")
			o.SetName("py-agent-x-tls")
			require.NoError(s.t, s.client.Create(s.t.Context(), o))
			s.answer(o, map[string]any{"type": "Ready", "status": "True"}, []byte("forged"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSigner(t)
			first(s)
			before, _, _ := unstructured.NestedString(s.request().Object, "spec", "request")
			r := s.requests()
			data, err := r.Issue(t.Context(), id, now)
			require.NoError(t, err)
			require.Nil(t, data)
			after, _, _ := unstructured.NestedString(s.request().Object, "spec", "request")
			require.NotEqual(t, before, after)
			s.sign()
			data, err = r.Issue(t.Context(), id, now)
			require.NoError(t, err)
			require.NotNil(t, data)
		})
	}
}

// TestAnswersThatAreRefused: whatever the issuer does, an agent gets the certificate of its own Pod, as a server alone, that its callers
// trust, or none.
func TestAnswersThatAreRefused(t *testing.T) {
	condition := func(c map[string]any) func(*signer) { return func(s *signer) { s.answer(s.request(), c, nil) } }
	signed := func(change func(*x509.Certificate)) func(*signer) {
		return func(s *signer) { s.change = change; s.sign() }
	}
	other := id
	other.UID = "other"
	foreign, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	for name, tt := range map[string]struct {
		answer func(s *signer)
		want   string
	}{
		"denied":         {condition(map[string]any{"type": "Denied", "status": "True", "reason": "Policy", "message": "no"}), "the CertificateRequest is Denied (Policy): no"},
		"invalid":        {condition(map[string]any{"type": "InvalidRequest", "status": "True"}), "the CertificateRequest is InvalidRequest"},
		"failed":         {condition(map[string]any{"type": "Ready", "status": "False", "reason": "Failed", "message": "no issuer"}), "no issuer"},
		"another agent":  {signed(func(c *x509.Certificate) { c.URIs[0] = other.URI() }), "has the names"},
		"two agents":     {signed(func(c *x509.Certificate) { c.URIs = append(c.URIs, other.URI()) }), "has the names"},
		"another server": {signed(func(c *x509.Certificate) { c.DNSNames = append(c.DNSNames, "allocator.fast-sandbox.io") }), "has the names"},
		"a client":       {signed(func(c *x509.Certificate) { c.ExtKeyUsage = append(c.ExtKeyUsage, x509.ExtKeyUsageClientAuth) }), "not that of a server alone"},
		"another key":    {signed(func(c *x509.Certificate) { c.PublicKey = foreign.Public() }), "private key does not match"},
		"it has expired": {signed(func(c *x509.Certificate) { c.NotBefore, c.NotAfter = now.Add(-time.Hour), now.Add(-time.Second) }), "expired"},
		"not trusted":    {func(s *signer) { o := newSigner(s.t); s.cert, s.key = o.cert, o.key; s.sign() }, "unknown authority"},
		"no certificate": {func(s *signer) {
			s.answer(s.request(), map[string]any{"type": "Ready", "status": "True"}, []byte("none"))
		}, "tls:"},
		"clocks disagree": {signed(func(c *x509.Certificate) { c.NotBefore = now.Add(time.Minute) }), ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSigner(t)
			r := s.requests()
			_, err := r.Issue(t.Context(), id, now)
			require.NoError(t, err)
			tt.answer(s)
			data, err := r.Issue(t.Context(), id, now)
			require.Nil(t, s.request(), "one request is for one certificate")
			if tt.want == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, tt.want)
			require.Nil(t, data)
			_, err = r.Issue(t.Context(), id, now)
			require.NoError(t, err)
			require.NotNil(t, s.request(), "it is requested again")
		})
	}
}

func TestRenewAt(t *testing.T) {
	s := newSigner(t)
	r := s.requests()
	_, err := r.Issue(t.Context(), id, now)
	require.NoError(t, err)
	s.sign()
	data, err := r.Issue(t.Context(), id, now)
	require.NoError(t, err)
	other := id
	other.UID = "other"
	for name, tt := range map[string]struct {
		requests *certmanager.Requests
		id       rpc.AgentID
		data     map[string][]byte
	}{
		"of another Pod":                  {r, other, data},
		"of an authority that is no more": {newSigner(t).requests(), id, data},
		"without a trusted authority":     {r, id, map[string][]byte{"tls.crt": data["tls.crt"], "tls.key": data["tls.key"]}},
		"without a key":                   {r, id, map[string][]byte{"tls.crt": data["tls.crt"], "ca.crt": data["ca.crt"]}},
		"none":                            {r, id, nil},
	} {
		at, err := tt.requests.RenewAt(tt.id, tt.data)
		require.NoError(t, err, name)
		require.Zero(t, at, name)
	}
}

func TestParseIssuer(t *testing.T) {
	for text, want := range map[string][2]string{
		"agents": {"ClusterIssuer", "agents"}, "Issuer/a": {"Issuer", "a"}, "ClusterIssuer/b": {"ClusterIssuer", "b"}, "": {}, "Issuer/": {}, "Secret/x": {},
	} {
		kind, name, err := certmanager.ParseIssuer(text)
		require.Equal(t, want == [2]string{}, err != nil, text)
		require.Equal(t, want, [2]string{kind, name}, text)
	}
}
