package rpc

import "crypto/tls"

// RoleOf is the role of the peer of a TLS connection that no gRPC server made (the gateway's), or "" if it showed none.
func RoleOf(state *tls.ConnectionState) Role {
	if state == nil || len(state.PeerCertificates) == 0 {
		return ""
	}
	return roleOf(state.PeerCertificates[0])
}
