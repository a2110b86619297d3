package rpc

import (
	"context"
	"maps"
	"net"
	"net/http"
	"slices"
)

// ServeHTTP serves one gRPC call that has come to an HTTP/2 server of net/http. It passes the same checks as one over the server's own listener: the
// certificate is that of the request, and the address. The call ends with its request, and not with Run: the HTTP server drains. It needs
// ServerConfig.Web.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.web.ServeHTTP(w, r) }

// Services returns the full names of the services, in their order.
func (s *Server) Services() []string { return slices.Sorted(maps.Keys(s.grpc.GetServiceInfo())) }

type connKey struct{}

// ConnContext returns the context of the requests of a connection, so that calls without valid credentials count for it. It is
// http.Server.ConnContext.
func ConnContext(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, conn)
}

// StrangeRequest is Strange for the connection of a request, if ConnContext has named it.
func StrangeRequest(ctx context.Context) bool {
	conn, ok := ctx.Value(connKey{}).(net.Conn)
	return ok && Strange(conn)
}
