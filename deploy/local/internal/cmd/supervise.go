package cmd

import (
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/cluster"
)

func newSupervise() *cobra.Command {
	var config string
	cmd := &cobra.Command{
		Use:     "supervise",
		Short:   "Keep the components running; `up` starts it",
		Example: "  fsb-local supervise --config /run/fsb-local/cluster.json",
		Hidden:  true,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := cluster.LoadConfig(config)
			if err != nil {
				return err
			}
			logger := slog.New(slog.NewJSONHandler(os.Stderr, nil))
			return cluster.Supervise(cmd.Context(), c, append(proxies(), "HOME=/root"), logger)
		},
	}
	cmd.Flags().StringVar(&config, "config", "/run/fsb-local/cluster.json", "the cluster's configuration, as `up` wrote it")
	return cmd
}
