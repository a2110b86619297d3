// The controller reconciles Sandboxes and SandboxPools.
package main

import (
	"context"

	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/app"
)

func main() {
	cfg := &app.Config{}
	daemon.Main(daemon.Program{
		Name:  "controller",
		Short: "Reconcile Sandboxes and SandboxPools",
		Long: `controller reconciles Sandboxes (create, delete, expire, reset, loss of an agent) and the agent Pods of SandboxPools. It
reserves capacity at the allocator, and asks agents for containers. Only one replica is active at a time.`,
		Example: "  controller --namespace=fast-sandbox-system --allocator-address=kubernetes:///allocator.fast-sandbox-system:9090 \\\n" +
			"    --tls-cert-file=tls.crt --tls-key-file=tls.key --tls-ca-file=ca.crt",
		Config: cfg,
		Run:    func(ctx context.Context) error { return app.Run(ctx, *cfg) },
	})
}
