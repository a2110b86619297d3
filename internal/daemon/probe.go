package daemon

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	healthSocketFlag    = "health-socket"
	defaultHealthSocket = "/run/fast-sandbox/health.sock"
	// probeTimeout is how long a probe waits at most. The kubelet ends one earlier that has a lower timeout.
	probeTimeout = 10 * time.Second
)

// probe returns the subcommand by which the kubelet asks a running daemon for its health: exec probes run it in the daemon's container.
func probe(program string) *cobra.Command {
	var socket, service string
	cmd := &cobra.Command{
		Use: "probe", Short: "Ask a running " + program + " whether it is ready", Args: cobra.NoArgs,
		Long: "Ask the " + program + " that runs in the same container whether it is ready. The exit code is 0 if it is, and 1 if not.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := config.Load(cmd, EnvPrefix); err != nil {
				return usageError{err}
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), probeTimeout)
			defer cancel()
			if err := rpc.Probe(ctx, socket, service); err != nil {
				return fmt.Errorf("probing: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&socket, healthSocketFlag, defaultHealthSocket, "`path` of the unix socket of the gRPC health service")
	cmd.Flags().StringVar(&service, "service", "", "full `name` of the gRPC service to ask about; empty: the process as a whole")
	return cmd
}
