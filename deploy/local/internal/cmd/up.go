package cmd

import (
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/cluster"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
)

func newUp(c *components.Config) *cobra.Command {
	var o cluster.Options
	var noDemo, traces bool
	var began int64
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Bring the cluster up, install Fast Sandbox, run a first sandbox",
		Long: `up brings up each part of the cluster that is missing, changed or broken, and returns within seconds if there is none. It
cleans up after interrupted runs. It installs missing packages of the distribution with apt-get.`,
		Example: "  sudo fsb-local up --manifests deploy/overlays/local\n  sudo fsb-local up --no-demo     # Kubernetes alone",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Config, o.Demo, o.Out = *c, !noDemo, cmd.OutOrStdout()
			o.Config.Traces = c.Traces || traces
			if began > 0 {
				o.Began = time.Unix(began, 0)
			}
			if o.Images == "" {
				o.Images = filepath.Join(filepath.Dir(c.BinDir), "deploy", "images")
			}
			return cluster.Up(cmd.Context(), o)
		},
	}
	cmd.Flags().StringVar(&o.Manifests, "manifests", "", "kustomize directory, or file, to apply; none for a bare cluster")
	cmd.Flags().StringVar(&o.Images, "images", "", "directory of image descriptions (default deploy/images beside --bin-dir)")
	cmd.Flags().BoolVar(&traces, "trace", false, "run a trace store (Jaeger) beside the cluster, until down")
	cmd.Flags().Int64Var(&began, "began", 0, "when the set-up began, in seconds since 1970: progress shows the time since then")
	cmd.Flags().BoolVar(&noDemo, "no-demo", false, "do not run a first sandbox")
	return cmd
}

func newDown(c *components.Config) *cobra.Command {
	var o cluster.Options
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Remove the cluster from this machine",
		Long: `down stops everything and removes processes, containers, mounts, cgroups, the network namespace, logs and all state, however
broken the cluster is. It keeps only the cache of downloaded packages and your registry settings (certs.d); --purge removes those too.`,
		Example: "  sudo fsb-local down\n  sudo fsb-local down --purge",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Config, o.Out = *c, cmd.OutOrStdout()
			return cluster.Down(cmd.Context(), o)
		},
	}
	cmd.Flags().BoolVar(&o.Purge, "purge", false, "remove the cache and registry settings too")
	return cmd
}
