// Package certmanager has cert-manager sign the certificates of agents, in place of an authority whose key the controller has. It makes
// the key of each certificate, asks for its signature by a CertificateRequest that is named after the agent's Pod and goes with it,
// and takes the answer only if it is the certificate of that Pod, by an authority that the agents' callers trust. The key is in no
// object before it is in the Pod's Secret: a controller that has lost it, because it was restarted, asks again with another one.
//
// All methods may be called concurrently.
package certmanager

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/issuer"
)

// Group is the API group of cert-manager.
const Group = "cert-manager.io"

// Kinds of issuers.
const (
	ClusterIssuer = "ClusterIssuer"
	Issuer        = "Issuer"
)

// keepFor is how long the key of a request that nothing asks about is kept: its Pod was deleted.
const keepFor = time.Hour

// skew is how far the clock of the signer may be ahead.
const skew = 5 * time.Minute

// Config is what Requests needs.
type Config struct {
	// Client writes CertificateRequests, and Live reads them from the API server.
	Client client.Client
	Live   client.Reader
	// Kind and Name of the issuer: a ClusterIssuer, or an Issuer that each namespace with a pool has.
	Kind, Name string
	// TrustFile is the PEM file of the authorities that sign the certificates of an agent's callers, and that they trust.
	TrustFile string
	// Life is how long a certificate is to be valid.
	Life time.Duration
}

// Requests issues certificates by CertificateRequests.
type Requests struct {
	config Config

	mu      sync.Mutex
	pending map[rpc.AgentID]pending
}

// pending is a key for which a certificate was requested.
type pending struct {
	key     *ecdsa.PrivateKey
	request []byte // the signing request, in PEM
	at      time.Time
}

// New returns a Requests without requests.
func New(cfg Config) *Requests { return &Requests{config: cfg, pending: map[rpc.AgentID]pending{}} }

// ParseIssuer reads KIND/NAME, or NAME for a ClusterIssuer.
func ParseIssuer(text string) (kind, name string, err error) {
	kind, name, ok := strings.Cut(text, "/")
	if !ok {
		kind, name = ClusterIssuer, text
	}
	if name == "" || kind != ClusterIssuer && kind != Issuer {
		return "", "", fmt.Errorf("%q is not NAME, %s/NAME or %s/NAME", text, ClusterIssuer, Issuer)
	}
	return kind, name, nil
}

// Issue returns the data of a Secret of type kubernetes.io/tls once cert-manager has signed the agent's certificate. Until then it
// returns nil, and the first call requests the certificate. A request that was denied or has failed is an error, and the next call makes
// another one.
func (r *Requests) Issue(ctx context.Context, id rpc.AgentID, now time.Time) (map[string][]byte, error) {
	data, err := r.issue(ctx, id, now)
	if err != nil {
		return nil, fmt.Errorf("issuing the certificate of agent %s: %w", id, err)
	}
	return data, nil
}

func (r *Requests) issue(ctx context.Context, id rpc.AgentID, now time.Time) (map[string][]byte, error) {
	there := object()
	err := r.config.Live.Get(ctx, types.NamespacedName{Namespace: id.Namespace, Name: requestName(id)}, there)
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("reading the CertificateRequest: %w", err)
	}
	mine, ok := r.requested(id)
	if found := err == nil; !ok || !found || !isOf(there, mine) {
		if found { // of a controller that no longer has its key, or of another user
			if err := r.remove(ctx, there); err != nil {
				return nil, err
			}
		}
		return nil, r.request(ctx, id, now)
	}
	chain, err := answer(there)
	if err == nil && chain == nil {
		return nil, nil
	}
	// One request is for one certificate, whether it is good or not.
	r.drop(id)
	if removeErr := r.remove(ctx, there); err != nil || removeErr != nil {
		return nil, errors.Join(err, removeErr)
	}
	return r.data(id, chain, mine.key, now)
}

// request makes a key and requests a certificate for it.
func (r *Requests) request(ctx context.Context, id rpc.AgentID, now time.Time) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: rpc.AgentDomain}, DNSNames: []string{rpc.AgentDomain}, URIs: []*url.URL{id.URI()},
	}, key)
	if err != nil {
		return err
	}
	p := pending{key: key, request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), at: now}
	o := object()
	o.SetNamespace(id.Namespace)
	o.SetName(requestName(id))
	o.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: id.Pod, UID: types.UID(id.UID), Controller: ptr.To(true)}})
	o.Object["spec"] = map[string]any{
		"request": base64.StdEncoding.EncodeToString(p.request), "duration": r.config.Life.String(), "isCA": false,
		"usages":    []any{"digital signature", "server auth"},
		"issuerRef": map[string]any{"group": Group, "kind": r.config.Kind, "name": r.config.Name},
	}
	r.keep(id, p, now)
	if err := r.config.Client.Create(ctx, o); err != nil {
		r.drop(id)
		return fmt.Errorf("creating a CertificateRequest: %w", err)
	}
	return nil
}

// RenewAt returns when the certificate in the data of a Secret has to be replaced: after two thirds of its time, and at once (the zero
// time) if it is not one that Issue would take.
func (r *Requests) RenewAt(id rpc.AgentID, data map[string][]byte) (time.Time, error) {
	trust, err := os.ReadFile(r.config.TrustFile)
	if err != nil {
		return time.Time{}, fmt.Errorf("reading the authorities of the callers of agents: %w", err)
	}
	pair, err := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	if err != nil || !bytes.Equal(data[issuer.TrustKey], trust) || check(id, pair, trust, pair.Leaf.NotBefore) != nil {
		return time.Time{}, nil //nolint:nilerr // one that is not right is replaced
	}
	return pair.Leaf.NotBefore.Add(pair.Leaf.NotAfter.Sub(pair.Leaf.NotBefore) * 2 / 3), nil
}

// data returns the data of a Secret, if the chain is what was requested.
func (r *Requests) data(id rpc.AgentID, chain []byte, key *ecdsa.PrivateKey, now time.Time) (map[string][]byte, error) {
	trust, err := os.ReadFile(r.config.TrustFile)
	if err != nil {
		return nil, fmt.Errorf("reading the authorities of the callers of agents: %w", err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
	pair, err := tls.X509KeyPair(chain, keyPEM)
	if err != nil {
		return nil, fmt.Errorf("reading what %s %s has signed: %w", r.config.Kind, r.config.Name, err)
	}
	if ahead := pair.Leaf.NotBefore.Sub(now); ahead > 0 && ahead < skew {
		now = pair.Leaf.NotBefore
	}
	if err := check(id, pair, trust, now); err != nil {
		return nil, fmt.Errorf("checking what %s %s has signed: %w", r.config.Kind, r.config.Name, err)
	}
	return map[string][]byte{corev1.TLSCertKey: chain, corev1.TLSPrivateKeyKey: keyPEM, issuer.TrustKey: trust}, nil
}

// check checks that a certificate is that of a server which is this agent and nothing else, for those who trust the authorities.
func check(id rpc.AgentID, pair tls.Certificate, trust []byte, at time.Time) error {
	named, ok := rpc.AgentOf(pair.Leaf)
	if !ok || named != id || len(pair.Leaf.URIs) != 1 || !slices.Equal(pair.Leaf.DNSNames, []string{rpc.AgentDomain}) {
		return fmt.Errorf("the certificate has the names %q %q", pair.Leaf.DNSNames, pair.Leaf.URIs)
	}
	if !slices.Equal(pair.Leaf.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}) {
		return errors.New("the certificate is not that of a server alone")
	}
	options := x509.VerifyOptions{Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(), CurrentTime: at, DNSName: rpc.AgentDomain}
	options.Roots.AppendCertsFromPEM(trust)
	for _, der := range pair.Certificate[1:] {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return err
		}
		options.Intermediates.AddCert(cert)
	}
	_, err := pair.Leaf.Verify(options)
	return err
}

func (r *Requests) requested(id rpc.AgentID) (pending, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, ok := r.pending[id]
	return p, ok
}

// keep remembers a key, and forgets those of Pods that are gone.
func (r *Requests) keep(id rpc.AgentID, p pending, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for other, old := range r.pending {
		if now.Sub(old.at) > keepFor {
			delete(r.pending, other)
		}
	}
	r.pending[id] = p
}

func (r *Requests) drop(id rpc.AgentID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pending, id)
}

func (r *Requests) remove(ctx context.Context, o *unstructured.Unstructured) error {
	err := r.config.Client.Delete(ctx, o, client.Preconditions{UID: ptr.To(o.GetUID())})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("deleting the CertificateRequest: %w", err)
	}
	return nil
}

func requestName(id rpc.AgentID) string { return id.Pod + "-tls" }

func object() *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(schema.GroupVersionKind{Group: Group, Version: "v1", Kind: "CertificateRequest"})
	return o
}

// isOf reports whether an object is the request for a key.
func isOf(o *unstructured.Unstructured, p pending) bool {
	raw, _, _ := unstructured.NestedString(o.Object, "spec", "request")
	return raw == base64.StdEncoding.EncodeToString(p.request)
}

// answer returns the certificate with its chain, in PEM; nil if there is none yet.
func answer(o *unstructured.Unstructured) ([]byte, error) {
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	ready := false
	for _, raw := range conditions {
		c, _ := raw.(map[string]any)
		kind, status, reason := c["type"], c["status"], c["reason"]
		switch {
		case (kind == "Denied" || kind == "InvalidRequest") && status == "True", kind == "Ready" && status == "False" && reason == "Failed":
			return nil, fmt.Errorf("the CertificateRequest is %v (%v): %v", kind, reason, c["message"])
		case kind == "Ready" && status == "True":
			ready = true
		}
	}
	text, _, _ := unstructured.NestedString(o.Object, "status", "certificate")
	if !ready || text == "" {
		return nil, nil
	}
	chain, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, fmt.Errorf("reading the CertificateRequest: %w", err)
	}
	return chain, nil
}
