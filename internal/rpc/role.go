package rpc

import "crypto/tls"

// RoleOf returns the role of the peer of a TLS connection that does not belong to a gRPC server, as in the gateway. It
// returns "" if the peer presented no certificate.
func RoleOf(state *tls.ConnectionState) Role {
	if state == nil || len(state.PeerCertificates) == 0 {
		return ""
	}
	return roleOf(state.PeerCertificates[0])
}
