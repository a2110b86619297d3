package cmd

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/image"
)

func newDigests(c *components.Config) *cobra.Command {
	var images, registry string
	cmd := &cobra.Command{
		Use:   "digests",
		Short: "Print the digests of Fast Sandbox's images",
		Long: `digests builds the images of Fast Sandbox from the binaries of --bin-dir, and prints their digests as JSON. It stores nothing, and needs
neither the cluster nor root. With --registry it prints a kustomize component instead, which names each image of an overlay by its digest in
that registry.`,
		Example: "  fsb-local digests\n  fsb-local digests --registry registry.example/team > my-overlay/images/kustomization.yaml",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if images == "" {
				images = filepath.Join(filepath.Dir(c.BinDir), "deploy", "images")
			}
			descriptions, err := image.Load(images)
			if err != nil {
				return err
			}
			digests, err := image.Builder{BinDir: c.BinDir}.Digests(cmd.Context(), descriptions)
			if err != nil {
				return err
			}
			if registry != "" {
				return printComponent(cmd.OutOrStdout(), registry, digests)
			}
			encoder := json.NewEncoder(cmd.OutOrStdout())
			encoder.SetIndent("", "  ")
			return encoder.Encode(digests)
		},
	}
	cmd.Flags().StringVar(&images, "images", "", "directory of image descriptions (default deploy/images beside --bin-dir)")
	cmd.Flags().StringVar(&registry, "registry", "", "print a kustomize component with the images at this prefix")
	return cmd
}

// pinned is an entry of a kustomization's images.
type pinned struct {
	Name    string `json:"name"`
	NewName string `json:"newName"`
	Digest  string `json:"digest"`
}

func printComponent(w io.Writer, registry string, digests map[string]string) error {
	var entries []pinned
	for _, name := range slices.Sorted(maps.Keys(digests)) {
		repository := name[:strings.LastIndex(name, ":")]
		entries = append(entries, pinned{Name: repository, NewName: strings.TrimRight(registry, "/") + "/" + path.Base(repository), Digest: digests[name]})
	}
	raw, err := yaml.Marshal(map[string]any{"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component", "images": entries})
	if err != nil {
		return fmt.Errorf("writing the component: %w", err)
	}
	_, err = fmt.Fprintf(w, "# Written by fsb-local digests: the images of a build, each by its digest.\n%s", raw)
	return err
}
