// Package issuer issues the certificates of agents, each for one Pod: it names the Pod in a SPIFFE id (rpc.AgentID), it is one of a server
// alone, and it is valid for a short time. It reads the authority's files each time, so that a new authority is used at once. It keeps
// nothing and writes nothing. All methods may be called concurrently.
package issuer

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// TrustKey is the key of a Secret that has the authorities which the agent trusts.
const TrustKey = "ca.crt"

const (
	// backdate allows for clocks that are behind.
	backdate = 5 * time.Minute
	// serialBits is the length of serial numbers.
	serialBits = 127
)

// Config is what an Issuer needs.
type Config struct {
	// CertFile and KeyFile are the PEM certificate, with the chain to a root that the callers of agents trust, and key of the authority.
	CertFile, KeyFile string
	// TrustFile is the PEM file of the authorities that sign the certificates of an agent's callers.
	TrustFile string
	// Life is how long a certificate is valid.
	Life time.Duration
}

// Issuer issues certificates.
type Issuer struct{ config Config }

// New returns an issuer.
func New(cfg Config) *Issuer { return &Issuer{cfg} }

// Issue returns a new key and certificate of an agent, as the data of a Secret of type kubernetes.io/tls.
func (i *Issuer) Issue(_ context.Context, id rpc.AgentID, now time.Time) (map[string][]byte, error) {
	data, err := i.issue(id, now)
	if err != nil {
		return nil, fmt.Errorf("issuing the certificate of agent %s: %w", id, err)
	}
	return data, nil
}

func (i *Issuer) issue(id rpc.AgentID, now time.Time) (map[string][]byte, error) {
	a, err := i.authority()
	if err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), serialBits))
	if err != nil {
		return nil, err
	}
	end := now.Add(i.config.Life)
	if end.After(a.cert.NotAfter) {
		end = a.cert.NotAfter
	}
	if !now.Before(end) {
		return nil, fmt.Errorf("the authority has expired at %s", a.cert.NotAfter.UTC().Format(time.RFC3339))
	}
	leaf, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: rpc.AgentDomain}, NotBefore: now.Add(-backdate), NotAfter: end,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: []string{rpc.AgentDomain}, URIs: []*url.URL{id.URI()},
	}, a.cert, key.Public(), a.key)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return map[string][]byte{
		corev1.TLSCertKey:       append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf}), a.chain...),
		corev1.TLSPrivateKeyKey: pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}),
		TrustKey:                a.trust,
	}, nil
}

// RenewAt returns when the certificate in the data of a Secret has to be replaced: after two thirds of its time, and at once (the zero
// time) if it is not what Issue would make: that of another agent, of an earlier authority, unreadable.
func (i *Issuer) RenewAt(id rpc.AgentID, data map[string][]byte) (time.Time, error) {
	a, err := i.authority()
	if err != nil {
		return time.Time{}, fmt.Errorf("checking the certificate of agent %s: %w", id, err)
	}
	pair, err := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return time.Time{}, nil //nolint:nilerr // an unreadable one is replaced
	}
	leaf := pair.Leaf
	named, ok := rpc.AgentOf(leaf)
	signed := leaf.CheckSignatureFrom(a.cert) == nil
	if !ok || !signed || named != id || !bytes.Equal(data[TrustKey], a.trust) {
		return time.Time{}, nil
	}
	return leaf.NotBefore.Add(leaf.NotAfter.Sub(leaf.NotBefore) * 2 / 3), nil
}

// authority is the authority as its files are now.
type authority struct {
	cert *x509.Certificate
	key  crypto.PrivateKey
	// chain is its certificate and those up to a root, trust the authorities of callers, in PEM.
	chain, trust []byte
}

func (i *Issuer) authority() (*authority, error) {
	chain, err := os.ReadFile(i.config.CertFile)
	if err != nil {
		return nil, fmt.Errorf("reading the authority of agents: %w", err)
	}
	key, err := os.ReadFile(i.config.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("reading the authority of agents: %w", err)
	}
	trust, err := os.ReadFile(i.config.TrustFile)
	if err != nil {
		return nil, fmt.Errorf("reading the authorities of the callers of agents: %w", err)
	}
	pair, err := tls.X509KeyPair(chain, key)
	if err != nil {
		return nil, fmt.Errorf("reading the authority of agents: %w", err)
	}
	if !pair.Leaf.IsCA {
		return nil, errors.New("reading the authority of agents: its certificate is not that of an authority")
	}
	return &authority{cert: pair.Leaf, key: pair.PrivateKey, chain: chain, trust: trust}, nil
}
