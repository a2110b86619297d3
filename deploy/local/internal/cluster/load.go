package cluster

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/image"
)

// LoadImage imports an image archive (docker save, or an OCI layout in a tar; "-" is standard input).
func LoadImage(ctx context.Context, c components.Config, archive string) error {
	source := os.Stdin
	if archive != "-" {
		file, err := os.Open(archive)
		if err != nil {
			return fmt.Errorf("opening the archive: %w", err)
		}
		defer func() { _ = file.Close() }()
		source = file
	}
	store := image.Store{Socket: c.ContainerdSocket(), Bin: c.ContainerdBin()}
	return store.ImportArchive(ctx, archive, func(w io.Writer) error {
		_, err := io.Copy(w, source)
		return err
	})
}
