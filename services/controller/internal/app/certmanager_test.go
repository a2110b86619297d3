//go:build integration

package app_test

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/yaml"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// installCertManager installs the definition of CertificateRequests, as far as the controller uses it, and the rights of the component
// cert-manager.
func (env *testEnv) installCertManager() {
	env.t.Helper()
	_, err := envtest.InstallCRDs(adminConf, envtest.CRDInstallOptions{Paths: []string{filepath.Join("testdata", "certificaterequests.yaml")}, ErrorIfPathMissing: true})
	require.NoError(env.t, err)
	raw, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "deploy", "components", "cert-manager", "rbac.yaml"))
	require.NoError(env.t, err)
	for document := range strings.SplitSeq(string(raw), "\n---\n") {
		u := &unstructured.Unstructured{}
		require.NoError(env.t, yaml.Unmarshal([]byte(document), &u.Object))
		require.NoError(env.t, kube.Create(env.ctx, u))
		env.t.Cleanup(func() { require.NoError(env.t, kube.Delete(context.WithoutCancel(env.ctx), u)) })
	}
}

// signRequests is cert-manager: it signs every request of the namespace by the authority of useAuthority, until stop is called.
func (env *testEnv) signRequests() (stop func()) {
	pair, err := tls.LoadX509KeyPair(env.config.AgentCACertFile, env.config.AgentCAKeyFile)
	require.NoError(env.t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(env.ctx))
	done := make(chan error, 1)
	go func() {
		done <- wait.PollUntilContextCancel(ctx, testkit.Tick, true, func(ctx context.Context) (bool, error) {
			list := &unstructured.UnstructuredList{}
			list.SetGroupVersionKind(schema.GroupVersionKind{Group: "cert-manager.io", Version: "v1", Kind: "CertificateRequestList"})
			if err := kube.List(ctx, list, client.InNamespace(env.namespace)); err != nil {
				return false, client.IgnoreNotFound(err)
			}
			for i := range list.Items {
				// One that was deleted, or made again meanwhile, is not answered.
				if err := answer(ctx, &list.Items[i], pair); err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
					return false, err
				}
			}
			return false, nil
		})
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		require.ErrorIs(env.t, <-done, context.Canceled)
	})
	env.t.Cleanup(stop)
	return stop
}

// answer signs a request that has no answer yet.
func answer(ctx context.Context, o *unstructured.Unstructured, ca tls.Certificate) error {
	if o.Object["status"] != nil {
		return nil
	}
	text, _, _ := unstructured.NestedString(o.Object, "spec", "request")
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return err
	}
	block, _ := pem.Decode(raw)
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return err
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: csr.Subject, DNSNames: csr.DNSNames, URIs: csr.URIs, KeyUsage: x509.KeyUsageDigitalSignature,
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, ca.Leaf, csr.PublicKey, ca.PrivateKey)
	if err != nil {
		return err
	}
	o.Object["status"] = map[string]any{
		"conditions":  []any{map[string]any{"type": "Ready", "status": "True", "reason": "Issued"}},
		"certificate": base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
	}
	return kube.Status().Update(ctx, o)
}

// TestAgentCertificatesByCertManager: with the rights of the component cert-manager, each agent gets a certificate for its Pod alone that
// cert-manager has signed, and another one from a new authority, without being restarted.
func TestAgentCertificatesByCertManager(t *testing.T) {
	env := newTestEnv(t)
	env.installCertManager()
	first := env.useAuthority()
	env.config.AgentCertificates, env.config.AgentIssuer = "cert-manager", "agents"
	env.start()
	env.pool()
	pod := env.waitForAgents(1)[0]
	secret := func() (*tls.Certificate, bool) {
		var s corev1.Secret
		if kube.Get(env.ctx, client.ObjectKey{Namespace: pod.Namespace, Name: pod.Name + "-tls"}, &s) != nil {
			return nil, false
		}
		pair, err := tls.X509KeyPair(s.Data["tls.crt"], s.Data["tls.key"])
		require.NoError(t, err)
		require.True(t, metav1.IsControlledBy(&s, &pod))
		return &pair, true
	}
	env.consistently(500*time.Millisecond, "there is a certificate that was not signed", func() bool { _, ok := secret(); return !ok })
	stop := env.signRequests()
	signedBy := func(ca *x509.Certificate) func() bool {
		return func() bool {
			pair, ok := secret()
			if !ok {
				return false
			}
			id, ok := rpc.AgentOf(pair.Leaf)
			require.True(t, ok)
			require.Equal(t, rpc.AgentID{Namespace: pod.Namespace, Pod: pod.Name, UID: string(pod.UID)}, id)
			return pair.Leaf.CheckSignatureFrom(ca) == nil
		}
	}
	env.eventually(signedBy(first), func() string { return "the agent has no certificate" })
	env.stop()
	stop()
	second := env.useAuthority()
	env.signRequests()
	env.start()
	env.eventually(signedBy(second), func() string { return "the certificate is still that of the first authority" })
	require.Equal(t, pod.UID, env.waitForAgents(1)[0].UID)
}
