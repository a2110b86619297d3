package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
)

// ErrNotBuilt is what Build returns for an image one of whose own binaries is not there yet.
var ErrNotBuilt = errors.New("binary not built")

// Builder builds images.
type Builder struct {
	// BinDir is where relative paths of files start.
	BinDir string
	// CacheDir keeps what is slow to make: the distribution's packages.
	CacheDir string
}

// Image is a built image.
type Image struct {
	Name   string
	Digest v1.Hash
	image  v1.Image
}

// Build builds an image. The same content gives the same digest, at any time, on any machine.
func (b Builder) Build(ctx context.Context, d Description) (*Image, error) {
	var layers []v1.Layer
	if len(d.Packages) > 0 {
		rootfs, err := b.rootfs(ctx, d)
		if err != nil {
			return nil, fmt.Errorf("building image %s: %w", d.Name, err)
		}
		layers = append(layers, rootfs)
	}
	own, err := b.ownLayer(ctx, d)
	if err != nil {
		return nil, fmt.Errorf("building image %s: %w", d.Name, err)
	}
	built, err := assemble(append(layers, own), d)
	if err != nil {
		return nil, fmt.Errorf("building image %s: %w", d.Name, err)
	}
	digest, err := built.Digest()
	if err != nil {
		return nil, fmt.Errorf("building image %s: %w", d.Name, err)
	}
	return &Image{Name: d.Name, Digest: digest, image: built}, nil
}

func assemble(layers []v1.Layer, d Description) (v1.Image, error) {
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	built, err := mutate.AppendLayers(base, layers...)
	if err != nil {
		return nil, fmt.Errorf("adding the layers: %w", err)
	}
	config, err := built.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("reading the configuration: %w", err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Config = v1.Config{
		User: d.User, WorkingDir: d.WorkingDir, Env: d.Env, Entrypoint: d.Entrypoint, Cmd: d.Command,
	}
	return mutate.ConfigFile(built, config)
}

// ownLayer holds the description's files, texts and directories.
func (b Builder) ownLayer(ctx context.Context, d Description) (v1.Layer, error) {
	tree := newTree()
	for _, file := range d.Files {
		if err := b.addFile(ctx, tree, file); err != nil {
			return nil, err
		}
	}
	for _, text := range d.Texts {
		if err := tree.file(text.Path, 0o644, []byte(text.Content)); err != nil {
			return nil, err
		}
	}
	for _, directory := range d.Directories {
		mode, err := directory.mode()
		if err != nil {
			return nil, fmt.Errorf("reading the mode of %s: %w", directory.Path, err)
		}
		if err := tree.directory(directory.Path, mode); err != nil {
			return nil, err
		}
	}
	return tree.layer()
}

func (b Builder) addFile(ctx context.Context, tree *tree, file File) error {
	source, own := file.From, !filepath.IsAbs(file.From)
	if own {
		source = filepath.Join(b.BinDir, source)
	}
	content, err := os.ReadFile(source)
	switch {
	case errors.Is(err, fs.ErrNotExist) && file.Optional:
		return nil
	case errors.Is(err, fs.ErrNotExist) && own:
		return fmt.Errorf("%s: %w", file.From, ErrNotBuilt)
	case err != nil:
		return fmt.Errorf("reading a file of the image: %w", err)
	}
	if err := tree.file(file.To, 0o755, content); err != nil {
		return err
	}
	links := file.Links
	if file.Applets != "" {
		list, err := host.Run(ctx, source, "--list")
		if err != nil {
			return fmt.Errorf("listing the applets: %w", err)
		}
		for applet := range strings.FieldsSeq(list) {
			if link := filepath.Join(file.Applets, applet); link != file.To {
				links = append(links, link)
			}
		}
	}
	for _, link := range links {
		if err := tree.link(link, file.To); err != nil {
			return err
		}
	}
	return nil
}
