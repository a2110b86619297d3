package rpc

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"strings"
)

// AgentDomain is the trust domain of agents: their certificates have the URI SAN spiffe://AgentDomain/NAMESPACE/POD/UID and the DNS name
// AgentDomain. It is one of its own, so that the authority that signs them can be constrained to it.
const AgentDomain = "agent." + Domain

// AgentID identifies an agent by its Pod.
type AgentID struct{ Namespace, Pod, UID string }

// URI returns the URI SAN of the agent's certificate.
func (id AgentID) URI() *url.URL {
	return &url.URL{Scheme: "spiffe", Host: AgentDomain, Path: "/" + id.Namespace + "/" + id.Pod + "/" + id.UID}
}

// String returns namespace/pod/uid.
func (id AgentID) String() string { return strings.TrimPrefix(id.URI().Path, "/") }

// AgentOf returns the agent in a verified certificate; false if it is not that of one agent.
func AgentOf(cert *x509.Certificate) (AgentID, bool) {
	for _, u := range cert.URIs {
		if u.Scheme != "spiffe" || u.Host != AgentDomain {
			continue
		}
		parts := strings.Split(strings.TrimPrefix(u.Path, "/"), "/")
		if len(parts) == 3 && parts[0] != "" && parts[1] != "" && parts[2] != "" {
			return AgentID{parts[0], parts[1], parts[2]}, true
		}
	}
	return AgentID{}, false
}

// errNotTheAgent is why a connection ends that does not lead to the agent that was meant: an address may be reused, or lie.
var errNotTheAgent = errors.New("the certificate is not that of the agent that is meant")

// verifyAgent verifies that a verified certificate is that of the agent whose Pod has the uid.
func verifyAgent(s tls.ConnectionState, uid string) error {
	switch id, ok := AgentOf(s.PeerCertificates[0]); {
	case !ok:
		return fmt.Errorf("verifying the server's certificate: it names no agent: %w", errNotTheAgent)
	case id.UID != uid:
		return fmt.Errorf("verifying the server's certificate: it is of agent %s, not of the Pod with the uid %s: %w", id, uid, errNotTheAgent)
	}
	return nil
}
