package auth

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Ticket lets a user call one method of an agent about one container. Agents cannot ask the API server about users, so the allocator,
// which has authorized the user, signs what the user may do with the key of its certificate, and the agent verifies that certificate.
type Ticket struct {
	// User is whom the ticket was issued to, for the log.
	User string `json:"user"`
	// Method is the full method (/package.Service/Method).
	Method string `json:"method"`
	// AgentUID, SandboxUID and Attempt identify the container.
	AgentUID   string `json:"agentUID"`
	SandboxUID string `json:"sandboxUID"`
	Attempt    int64  `json:"attempt"`
	// Expires is when the ticket ends. A stream that has begun continues.
	Expires time.Time `json:"expires"`
}

// TicketLife is how long a ticket is valid: long enough for one connection.
const TicketLife = time.Minute

const (
	ticketPrefix = "fsbt_"
	// maxTicket bounds the length of a ticket: a chain of four certificates fits.
	maxTicket = 32 << 10
)

// signed is what a ticket carries: its text, and the chain of the certificate whose key has signed it.
type signed struct {
	Ticket Ticket   `json:"ticket"`
	Chain  [][]byte `json:"chain"`
}

var encoding = base64.RawURLEncoding

// IsTicket reports whether a bearer token is a ticket.
func IsTicket(text string) bool { return strings.HasPrefix(text, ticketPrefix) }

// Sign returns the text of a ticket. chain is the certificate of the key, and those between it and the authority, in DER.
func (t Ticket) Sign(key crypto.PrivateKey, chain [][]byte) (string, error) {
	signer, ok := key.(crypto.Signer)
	if !ok {
		return "", fmt.Errorf("signing a ticket: a key of type %T cannot sign", key)
	}
	raw, err := json.Marshal(signed{t, chain})
	if err != nil {
		return "", fmt.Errorf("signing a ticket: %w", err)
	}
	body := ticketPrefix + encoding.EncodeToString(raw)
	_, hash, err := algorithm(signer.Public())
	if err != nil {
		return "", fmt.Errorf("signing a ticket: %w", err)
	}
	message := []byte(body)
	if hash != 0 {
		digest := sha256.Sum256(message)
		message = digest[:]
	}
	signature, err := signer.Sign(rand.Reader, message, hash)
	if err != nil {
		return "", fmt.Errorf("signing a ticket: %w", err)
	}
	return body + "." + encoding.EncodeToString(signature), nil
}

// ReadTicket verifies a ticket: its signature, the certificate of the signer, whom trusted has to accept, and the time.
func ReadTicket(text string, roots *x509.CertPool, trusted func(*x509.Certificate) bool, now time.Time) (Ticket, error) {
	if len(text) > maxTicket {
		return Ticket{}, unauthenticated("the ticket is too long")
	}
	body, encoded, ok := strings.Cut(text, ".")
	raw, ok2 := strings.CutPrefix(body, ticketPrefix)
	if !ok || !ok2 {
		return Ticket{}, unauthenticated("the ticket is malformed")
	}
	payload, err := encoding.DecodeString(raw)
	signature, err2 := encoding.DecodeString(encoded)
	var s signed
	if errors.Join(err, err2) != nil || json.Unmarshal(payload, &s) != nil || len(s.Chain) == 0 {
		return Ticket{}, unauthenticated("the ticket is malformed")
	}
	signer, err := verifyChain(s.Chain, roots, now)
	if err != nil || !trusted(signer) {
		return Ticket{}, unauthenticated("the ticket was not signed by an allocator")
	}
	algo, _, err := algorithm(signer.PublicKey)
	if err != nil || signer.CheckSignature(algo, []byte(body), signature) != nil {
		return Ticket{}, unauthenticated("the signature of the ticket is not valid")
	}
	if !now.Before(s.Ticket.Expires) || s.Ticket.Expires.Sub(now) > 2*TicketLife {
		return Ticket{}, unauthenticated("the ticket has expired")
	}
	return s.Ticket, nil
}

func verifyChain(chain [][]byte, roots *x509.CertPool, now time.Time) (*x509.Certificate, error) {
	options := x509.VerifyOptions{Roots: roots, Intermediates: x509.NewCertPool(), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	var leaf *x509.Certificate
	for i, der := range chain {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, err
		}
		if i == 0 {
			leaf = cert
			continue
		}
		options.Intermediates.AddCert(cert)
	}
	_, err := leaf.Verify(options)
	return leaf, err
}

// algorithm returns how a key signs.
func algorithm(key crypto.PublicKey) (x509.SignatureAlgorithm, crypto.Hash, error) {
	switch key.(type) {
	case *ecdsa.PublicKey:
		return x509.ECDSAWithSHA256, crypto.SHA256, nil
	case *rsa.PublicKey:
		return x509.SHA256WithRSA, crypto.SHA256, nil
	case ed25519.PublicKey:
		return x509.PureEd25519, 0, nil
	}
	return 0, 0, fmt.Errorf("keys of type %T are not supported", key)
}
