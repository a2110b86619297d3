// The gateway serves the public APIs as REST.
package main

import (
	"context"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/app"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
)

func main() {
	cfg := &app.Config{}
	daemon.Main(daemon.Program{
		Name:  "gateway",
		Short: "Serve the APIs as REST",
		Long: `gateway serves the public APIs as REST over HTTPS with mutual TLS (HTTP/1.1 and HTTP/2).

  /v1/namespaces/{namespace}/sandboxes[/{name}]   create, get, list, update, delete
  /v1/namespaces/{namespace}/sandboxes:watch      changes, as newline-delimited JSON
  /v1/namespaces/{namespace}/sandboxes/{name}:logs  output, as newline-delimited JSON, or raw with Accept: text/plain
  /v1/namespaces/{namespace}/sandboxes/{name}/processes  processes in it; files:stat and so on for its files
  /v1/namespaces/{namespace}/sandboxes/{name}/files  contents of files and archives, as bytes
  /v1/namespaces/{namespace}/sandboxes/{name}/terminal  a process's input and output, as a WebSocket
  /v1/namespaces/{namespace}/pools[/{name}]       pools
  /v1/namespaces/{namespace}/pools/{pool}/images  images; images:pull pulls one on each node
  /v1/namespaces/{namespace}/agents               agents
  /v1/gc/objects:explain, :previewDelete, :graph  why an object is kept, and what its deletion does
  /v1/gc/graph                                    the graph of owners, as newline-delimited JSON
  /{package}.{service}/{method}                   Connect and gRPC-Web for all gRPC services
  /openapi.json /openapi.yaml /healthz /readyz

A caller needs a bearer token or the client certificate of a user. Errors are google.rpc.Status in JSON.`,
		Example: "  gateway --allocator-address=kubernetes:///allocator.fast-sandbox-system:9090 \\\n" +
			"    --tls-cert-file=tls.crt --tls-key-file=tls.key --tls-ca-file=ca.crt",
		Config: cfg,
		Run:    func(ctx context.Context) error { return app.Run(ctx, *cfg) },
	})
}
