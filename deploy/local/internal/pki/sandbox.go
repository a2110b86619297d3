package pki

import (
	"net"
	"net/url"
)

// The namespaces of Fast Sandbox: its janitors, which mount host paths, have one of their own.
const (
	SandboxNamespace = "fast-sandbox-system"
	JanitorNamespace = "fast-sandbox-janitor"
)

const janitor = "janitor"

// Namespaces returns all of them.
func Namespaces() []string { return []string{SandboxNamespace, JanitorNamespace} }

// Namespace returns where the Secret with the certificate of a role is needed.
func Namespace(role string) string {
	if role == janitor {
		return JanitorNamespace
	}
	return SandboxNamespace
}

// ServerRoles are the components of Fast Sandbox that serve something, if only metrics. Each gets the certificate of a server, as the
// Secret ROLE-tls.
func ServerRoles() []string { return []string{"allocator", "controller", "gateway", janitor, "gc"} }

// ClientRoles are those that call others, and those who read metrics. Each gets the certificate of a client, as the Secret
// ROLE-client-tls.
func ClientRoles() []string { return []string{"allocator", "controller", "gateway", "metrics"} }

// The authority that signs the certificates of agents, each for one Pod: the controller has it, as the Secret AgentAuthority. AgentDomain is
// the only domain that it can sign for.
const (
	AgentAuthority = "agent-ca"
	AgentDomain    = "agent.fast-sandbox.io"
)

// User is the subject of the person at this machine; the local overlay gives its group all rights.
func User() Subject {
	return Subject{CommonName: "local-admin", Organization: []string{"fast-sandbox:local-admins"}, Side: ClientSide}
}

// Server is the subject of a component as a server: the name by which the others know its role, and for those that callers reach
// from the machine or from Pods also the names and addresses that these use.
func Server(role string, nodeIP net.IP) Subject {
	s := Subject{CommonName: role + ".fast-sandbox.io", DNS: []string{role + ".fast-sandbox.io"}, URIs: roleURI(role), Side: ServerSide}
	if role == "allocator" || role == "gateway" {
		s.DNS = append(s.DNS, role, role+"."+SandboxNamespace+".svc", role+"."+SandboxNamespace+".svc.cluster.local", "localhost")
		s.IPs = []net.IP{net.IPv4(127, 0, 0, 1), nodeIP}
	}
	return s
}

// Client is the subject of a component as a client: its role (the SPIFFE URI, which authorization reads), and no name of a server.
func Client(role string) Subject {
	return Subject{CommonName: role + ".fast-sandbox.io", URIs: roleURI(role), Side: ClientSide}
}

func roleURI(role string) []*url.URL {
	return []*url.URL{{Scheme: "spiffe", Host: "fast-sandbox.io", Path: "/" + role}}
}
