// Package rpc is the one place where gRPC servers and clients of this project are made, and where errors become statuses
// and statuses errors. Every server has mutual TLS with certificate reload, health, reflection, OpenTelemetry, recovery,
// request validation, metrics, an access log, authorization by role and a graceful end; every client mutual TLS,
// keepalive, OpenTelemetry and, for kubernetes:/// targets, resolution through the EndpointSlice API.
//
// A call passes a server's interceptors in this order, which is also the order in which the log tells of it:
//
//	otelgrpc -> metrics -> access log -> status (fault -> google.rpc.Status) -> recovery -> authorization -> validation -> handler
//
// Everything here is safe for concurrent use.
package rpc
