// Command allocator schedules sandboxes from memory and serves the public API.
package main

import (
	"context"
	"runtime/debug"

	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/app"
)

// gcPercent is how much garbage may pile up, of what is kept. Most of what an allocator keeps stays for as long as a sandbox
// lives, and little is thrown away: Go's own 100 would hold a node's worth of memory for nothing.
const gcPercent = 40

func main() {
	if set := debug.SetGCPercent(gcPercent); set != 100 { // by GOGC
		debug.SetGCPercent(set)
	}
	cfg := app.NewConfig()
	daemon.Main(daemon.Program{
		Name:    "allocator",
		Short:   "Place sandboxes on agents and serve the public API",
		Long:    "The allocator keeps all agents and their free capacity in memory, creates sandboxes on the fast path, and serves\nsandbox.v1.SandboxService and allocator.v1.AllocatorService.",
		Example: "  allocator --kubeconfig ~/.kube/config --tls-cert-file tls.crt --tls-key-file tls.key --tls-ca-file ca.crt",
		Config:  cfg,
		Run: func(ctx context.Context) error {
			a, err := app.New(*cfg)
			if err != nil {
				return err
			}
			return a.Run(ctx)
		},
	})
}
