// Package rpc creates all gRPC servers and clients of this project, and is the only package that converts errors to statuses
// and back. Every server has mutual TLS with certificate reload, health, reflection, OpenTelemetry, panic recovery, request
// validation, metrics, an access log, authorization by role and graceful shutdown. Every client has mutual TLS, keepalive,
// OpenTelemetry and, for kubernetes:/// targets, resolution through the EndpointSlice API. The package contains no logic of
// a service.
//
// A call passes a server's interceptors in this order:
//
//	otelgrpc -> metrics -> access log -> status (fault -> google.rpc.Status) -> recovery -> authorization -> guard -> validation -> handler
//
// Everything is safe for concurrent use.
package rpc
