// Command agent runs the sandboxes of one agent Pod on the host's containerd.
package main

import (
	"context"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/app"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
)

func main() {
	cfg := &app.Config{}
	daemon.Main(daemon.Program{
		Name:  "agent",
		Short: "Run sandboxes on this node's containerd",
		Long: "agent serves fastsandbox.agent.v1.AgentService: it creates, watches and deletes sandboxes on the host's containerd,\n" +
			"within the network and cgroup of its own Pod. Sandboxes outlive it; the next agent of the same Pod adopts them.",
		Example: "  agent --pool default --pod-name a --pod-namespace default --pod-uid u --pod-ip 10.0.0.2 --node-name n --insecure",
		Config:  cfg,
		Run:     func(ctx context.Context) error { return app.Run(ctx, cfg) },
	})
}
