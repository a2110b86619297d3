// The garbage collectors: one for Pods, one for objects whose owners are deleted.
package main

import (
	"context"

	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/app"
)

func main() {
	cfg := &app.Config{}
	daemon.Main(daemon.Program{
		Name:  "gc",
		Short: "Collect garbage: Pods that no component ends, and objects whose owners are deleted",
		Long: `gc replaces the Pod and owner-reference garbage collectors of kube-controller-manager where those are disabled. With
--mode=observe, the default, it builds the graph of owners and deletes nothing. One replica acts at a time.`,
		Example: "  gc --mode=enforce --namespace=fast-sandbox-system --tls-cert-file=tls.crt --tls-key-file=tls.key --tls-ca-file=ca.crt",
		Config:  cfg,
		Run:     func(ctx context.Context) error { return app.Run(ctx, *cfg) },
	})
}
