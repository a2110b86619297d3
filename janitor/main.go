// The janitor removes from its node the containers, and what is left of containers, that no sandbox and no agent uses.
package main

import (
	"context"

	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/app"
)

func main() {
	cfg := &app.Config{}
	daemon.Main(daemon.Program{
		Name:  "janitor",
		Short: "Remove orphaned sandboxes from this node",
		Long: `janitor finds, on the node that it runs on, containers of sandboxes whose agent is gone, or whose Sandbox is gone or means
another container, and removes them with all that belongs to them: processes, snapshots, FIFOs, mounts, cgroups, output. It removes
nothing that it is not certain of: before each deletion it asks containerd and the API server themselves.`,
		Example: "  janitor --node-name=node-1 --tls-cert-file=tls.crt --tls-key-file=tls.key --tls-ca-file=ca.crt",
		Config:  cfg,
		Run:     func(ctx context.Context) error { return app.Run(ctx, cfg) },
	})
}
