//go:build integration

package app_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// useAuthority gives the controller a new authority for agents, and returns its certificate.
func (env *testEnv) useAuthority() *x509.Certificate {
	t := env.t
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "agents"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	keyDER, err := x509.MarshalECPrivateKey(key)
	require.NoError(t, err)
	dir := t.TempDir()
	for name, block := range map[string]*pem.Block{"ca.crt": {Type: "CERTIFICATE", Bytes: der}, "ca.key": {Type: "EC PRIVATE KEY", Bytes: keyDER}} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600))
	}
	env.config.TLS = rpc.TLS{CAFile: filepath.Join(dir, "ca.crt")}
	env.config.AgentCACertFile, env.config.AgentCAKeyFile = filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key")
	return cert
}

// TestAgentCertificates: with the controller's own rights, each agent gets a certificate for its Pod alone, and another one from a new
// authority, without being restarted.
func TestAgentCertificates(t *testing.T) {
	env := newTestEnv(t)
	first := env.useAuthority()
	env.start()
	env.pool()
	pod := env.waitForAgents(1)[0]
	signedBy := func(ca *x509.Certificate) func() bool {
		return func() bool {
			var s corev1.Secret
			if kube.Get(env.ctx, client.ObjectKey{Namespace: pod.Namespace, Name: pod.Name + "-tls"}, &s) != nil {
				return false
			}
			pair, err := tls.X509KeyPair(s.Data["tls.crt"], s.Data["tls.key"])
			require.NoError(t, err)
			id, ok := rpc.AgentOf(pair.Leaf)
			require.True(t, ok)
			require.Equal(t, rpc.AgentID{Namespace: pod.Namespace, Pod: pod.Name, UID: string(pod.UID)}, id)
			require.True(t, metav1.IsControlledBy(&s, &pod))
			return pair.Leaf.CheckSignatureFrom(ca) == nil
		}
	}
	env.eventually(signedBy(first), func() string { return "the agent has no certificate" })
	env.stop()
	second := env.useAuthority()
	env.start()
	env.eventually(signedBy(second), func() string { return "the certificate is still that of the first authority" })
	require.Equal(t, pod.UID, env.waitForAgents(1)[0].UID)
}
