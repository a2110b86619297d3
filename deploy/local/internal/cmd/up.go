package cmd

import (
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/cluster"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
)

func newUp(c *components.Config) *cobra.Command {
	var o cluster.Options
	var noDemo bool
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Bring the cluster up, install Fast Sandbox, run a first sandbox",
		Long: `up brings up whatever of the cluster is missing, changed or broken, and is quick when nothing is. It survives what
killed runs have left behind. Missing packages of the distribution are installed with apt-get.`,
		Example: "  sudo fsb-local up --manifests deploy/overlays/local\n  sudo fsb-local up --no-demo     # Kubernetes alone",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Config, o.Demo, o.Out = *c, !noDemo, cmd.OutOrStdout()
			if o.Images == "" {
				o.Images = filepath.Join(filepath.Dir(c.BinDir), "deploy", "images")
			}
			return cluster.Up(cmd.Context(), o)
		},
	}
	cmd.Flags().StringVar(&o.Manifests, "manifests", "", "kustomize directory, or file, to apply; none for a bare cluster")
	cmd.Flags().StringVar(&o.Images, "images", "", "directory of image descriptions (default deploy/images beside --bin-dir)")
	cmd.Flags().BoolVar(&noDemo, "no-demo", false, "do not run a first sandbox")
	return cmd
}

func newDown(c *components.Config) *cobra.Command {
	var o cluster.Options
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Remove the cluster from this machine",
		Long: `down stops everything and removes processes, containers, mounts, cgroups, the network namespace and all state, however
broken the cluster is. It keeps the cache of what is slow to make, and the logs of sandboxes; --purge removes those too.`,
		Example: "  sudo fsb-local down\n  sudo fsb-local down --purge",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Config, o.Out = *c, cmd.OutOrStdout()
			return cluster.Down(cmd.Context(), o)
		},
	}
	cmd.Flags().BoolVar(&o.Purge, "purge", false, "remove caches and logs too")
	return cmd
}
