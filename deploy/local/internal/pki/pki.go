// Package pki makes the certificates of the local cluster: small certificate authorities on disk and the certificates
// that they sign. All keys are ECDSA P-256.
//
// Every function is an "ensure": what exists and still fits is kept, anything else (missing, truncated by a crash, near its
// expiry, signed by an older CA, for other names) is replaced. Files are replaced atomically. Not for
// concurrent use on one directory; `fsb-local up` holds the cluster's lock.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
)

const (
	caLife   = 10 * 365 * 24 * time.Hour
	leafLife = 365 * 24 * time.Hour
	// renewBefore is how long before its expiry a certificate is replaced.
	renewBefore = 30 * 24 * time.Hour
	// backdate forgives a verifier whose clock is behind.
	backdate = 5 * time.Minute
)

// Subject identifies the holder of a certificate.
type Subject struct {
	CommonName   string
	Organization []string
	DNS          []string
	IPs          []net.IP
	URIs         []*url.URL
	// Side is the side of a TLS connection that it may be. Zero: both, as components of Kubernetes are with one certificate.
	Side Side
}

// Side is a side of a TLS connection.
type Side int

// The sides.
const (
	BothSides Side = iota
	ServerSide
	ClientSide
)

// usages returns the extended key usages of a certificate of a side.
func (s Side) usages() []x509.ExtKeyUsage {
	switch s {
	case ServerSide:
		return []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	case ClientSide:
		return []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	}
	return []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
}

// Authority is a certificate authority.
type Authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	// PEM is its certificate, CertFile and KeyFile where it is kept.
	PEM               []byte
	CertFile, KeyFile string
}

// Files are the paths of a certificate and its key.
type Files struct{ Cert, Key string }

// EnsureAuthority returns the authority kept as NAME.crt and NAME.key in dir. It creates one if there is none that is usable.
func EnsureAuthority(dir, name string, now time.Time) (*Authority, error) {
	authority := &Authority{CertFile: filepath.Join(dir, name+".crt"), KeyFile: filepath.Join(dir, name+".key")}
	if authority.load(now) {
		return authority, nil
	}
	return authority, authority.create(&x509.Certificate{Subject: pkix.Name{CommonName: name}, NotAfter: now.Add(caLife)}, nil, now)
}

// EnsureServerAuthority returns an authority below a, kept as NAME.crt and NAME.key in dir, that signs only the certificates of servers
// with a DNS name and a URI of one domain. It creates one if there is none that is usable.
func (a *Authority) EnsureServerAuthority(dir, name, domain string, now time.Time) (*Authority, error) {
	below := &Authority{CertFile: filepath.Join(dir, name+".crt"), KeyFile: filepath.Join(dir, name+".key")}
	if below.load(now) && below.certificate.CheckSignatureFrom(a.certificate) == nil && slices.Equal(below.certificate.PermittedURIDomains, []string{domain}) {
		return below, nil
	}
	return below, below.create(&x509.Certificate{
		Subject: pkix.Name{CommonName: name}, NotAfter: a.certificate.NotAfter,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, PermittedDNSDomainsCritical: true,
		PermittedDNSDomains: []string{domain}, PermittedURIDomains: []string{domain},
	}, a, now)
}

// create makes the authority from a template, signed by another one, or by itself if by is nil.
func (a *Authority) create(template *x509.Certificate, by *Authority, now time.Time) error {
	name := template.Subject.CommonName
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("making the key of %s: %w", name, err)
	}
	template.NotBefore, template.BasicConstraintsValid, template.IsCA = now.Add(-backdate), true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature
	parent, signer := template, key
	if by != nil {
		parent, signer = by.certificate, by.key
	}
	if a.certificate, a.PEM, err = sign(template, parent, key, signer); err != nil {
		return fmt.Errorf("making the authority %s: %w", name, err)
	}
	a.key = key
	return write(a.CertFile, a.KeyFile, a.PEM, key)
}

// load reads the authority from its files and reports whether it is usable.
func (a *Authority) load(now time.Time) bool {
	pair, err := tls.LoadX509KeyPair(a.CertFile, a.KeyFile)
	if err != nil {
		return false
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	// A leaf must not outlive its authority, and a clock that was set back makes one that is not valid yet.
	if !ok || !pair.Leaf.IsCA || now.Before(pair.Leaf.NotBefore) || now.Add(leafLife+renewBefore).After(pair.Leaf.NotAfter) {
		return false
	}
	a.certificate, a.key = pair.Leaf, key
	a.PEM = encode("CERTIFICATE", pair.Leaf.Raw)
	return true
}

// Ensure keeps a certificate for the subject in the files.
func (a *Authority) Ensure(files Files, subject Subject, now time.Time) error {
	if pair, err := tls.LoadX509KeyPair(files.Cert, files.Key); err == nil && a.fits(pair.Leaf, subject, now) {
		return nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("making the key of %s: %w", subject.CommonName, err)
	}
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: subject.CommonName, Organization: subject.Organization},
		NotBefore:   now.Add(-backdate),
		NotAfter:    now.Add(leafLife),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: subject.Side.usages(),
		DNSNames:    subject.DNS,
		IPAddresses: subject.IPs,
		URIs:        subject.URIs,
	}
	_, raw, err := sign(template, a.certificate, key, a.key)
	if err != nil {
		return fmt.Errorf("making the certificate of %s: %w", subject.CommonName, err)
	}
	return write(files.Cert, files.Key, raw, key)
}

// fits reports whether an existing certificate is what Ensure would create.
func (a *Authority) fits(leaf *x509.Certificate, subject Subject, now time.Time) bool {
	return leaf.CheckSignatureFrom(a.certificate) == nil &&
		now.Before(leaf.NotAfter.Add(-renewBefore)) && !now.Before(leaf.NotBefore) &&
		leaf.Subject.CommonName == subject.CommonName &&
		slices.Equal(leaf.Subject.Organization, subject.Organization) &&
		slices.Equal(leaf.DNSNames, subject.DNS) && slices.Equal(leaf.ExtKeyUsage, subject.Side.usages()) &&
		slices.EqualFunc(leaf.IPAddresses, subject.IPs, net.IP.Equal) &&
		slices.EqualFunc(leaf.URIs, subject.URIs, func(x, y *url.URL) bool { return x.String() == y.String() })
}

// EnsureSigningKey keeps a key pair without a certificate, as Kubernetes signs service account tokens with: the private
// key in files.Key and the public one in files.Cert.
func EnsureSigningKey(files Files) error {
	key, err := readKey(files.Key)
	if err != nil {
		return err
	}
	if key == nil {
		if key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
			return fmt.Errorf("making a signing key: %w", err)
		}
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return fmt.Errorf("encoding a public key: %w", err)
	}
	return write(files.Cert, files.Key, encode("PUBLIC KEY", public), key)
}

// readKey reads a private key; nil if there is no usable one.
func readKey(path string) (*ecdsa.PrivateKey, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading a signing key: %w", err)
	}
	block, _ := pem.Decode(raw)
	if block == nil {
		return nil, nil
	}
	key, err := x509.ParseECPrivateKey(block.Bytes)
	if err != nil {
		return nil, nil //nolint:nilerr // an unreadable key is replaced, as a missing one
	}
	return key, nil
}

func sign(template, parent *x509.Certificate, key, by *ecdsa.PrivateKey) (*x509.Certificate, []byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, nil, fmt.Errorf("drawing a serial number: %w", err)
	}
	template.SerialNumber = serial
	raw, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
	if err != nil {
		return nil, nil, fmt.Errorf("signing: %w", err)
	}
	certificate, err := x509.ParseCertificate(raw)
	if err != nil {
		return nil, nil, fmt.Errorf("reading back: %w", err)
	}
	return certificate, encode("CERTIFICATE", raw), nil
}

func write(certFile, keyFile string, cert []byte, key *ecdsa.PrivateKey) error {
	raw, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return fmt.Errorf("encoding a key: %w", err)
	}
	// The key first: a crash between the two leaves a pair that does not match, which the next Ensure replaces.
	if _, err := host.WriteFile(keyFile, encode("EC PRIVATE KEY", raw), 0o600); err != nil {
		return err
	}
	_, err = host.WriteFile(certFile, cert, 0o644)
	return err
}

func encode(kind string, raw []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: raw})
}
