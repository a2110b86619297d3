package pki

import (
	"net"
	"net/url"
)

// SandboxNamespace is where Fast Sandbox runs.
const SandboxNamespace = "fast-sandbox-system"

// ServerRoles are the components of Fast Sandbox that get a certificate in the cluster, as the Secret ROLE-tls.
// RoleClient is the identity of the person at this machine.
func ServerRoles() []string {
	return []string{"allocator", "controller", "agent", "gateway", "janitor", "gc"}
}

// RoleClient is the role of a caller from outside the cluster.
const RoleClient = "client"

// Role is the subject of a Fast Sandbox component: who it is (the SPIFFE URI, which authorization reads) and the
// names by which clients reach it.
func Role(role string, nodeIP net.IP) Subject {
	return Subject{
		CommonName: role + ".fast-sandbox.io",
		DNS: []string{
			role + ".fast-sandbox.io",
			role,
			role + "." + SandboxNamespace + ".svc",
			role + "." + SandboxNamespace + ".svc.cluster.local",
			"localhost",
		},
		IPs:  []net.IP{net.IPv4(127, 0, 0, 1), nodeIP},
		URIs: []*url.URL{{Scheme: "spiffe", Host: "fast-sandbox.io", Path: "/" + role}},
	}
}
