package image

import (
	"archive/tar"
	"encoding/json"
	"fmt"
	"io"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// nameAnnotation holds the name under which containerd stores a manifest of an archive.
const nameAnnotation = "io.containerd.image.name"

// Write writes the image as an OCI archive (image-layout in a tar). containerd keeps its manifest byte for byte, so the
// digest in containerd is Digest.
func (i *Image) Write(w io.Writer) error {
	archive := tar.NewWriter(w)
	manifest, err := i.image.RawManifest()
	if err != nil {
		return fmt.Errorf("archiving %s: %w", i.Name, err)
	}
	config, err := i.image.RawConfigFile()
	if err != nil {
		return fmt.Errorf("archiving %s: %w", i.Name, err)
	}
	index, err := json.Marshal(v1.IndexManifest{
		SchemaVersion: 2, MediaType: types.OCIImageIndex,
		Manifests: []v1.Descriptor{{
			MediaType: types.OCIManifestSchema1, Size: int64(len(manifest)), Digest: i.Digest,
			Annotations: map[string]string{nameAnnotation: i.Name},
		}},
	})
	if err != nil {
		return fmt.Errorf("archiving %s: %w", i.Name, err)
	}
	configName, err := i.image.ConfigName()
	if err != nil {
		return fmt.Errorf("archiving %s: %w", i.Name, err)
	}
	files := []struct {
		name    string
		content []byte
	}{
		{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{"index.json", index},
		{blob(i.Digest), manifest},
		{blob(configName), config},
	}
	for _, file := range files {
		if err := writeEntry(archive, file.name, file.content); err != nil {
			return err
		}
	}
	if err := i.writeLayers(archive); err != nil {
		return err
	}
	return archive.Close()
}

func (i *Image) writeLayers(archive *tar.Writer) error {
	layers, err := i.image.Layers()
	if err != nil {
		return fmt.Errorf("archiving %s: %w", i.Name, err)
	}
	written := make(map[v1.Hash]bool)
	for _, layer := range layers {
		digest, err := layer.Digest()
		if err != nil {
			return fmt.Errorf("archiving %s: %w", i.Name, err)
		}
		if written[digest] {
			continue
		}
		written[digest] = true
		content, err := layer.Compressed()
		if err != nil {
			return fmt.Errorf("archiving %s: %w", i.Name, err)
		}
		raw, err := io.ReadAll(content)
		if err != nil {
			return fmt.Errorf("archiving %s: %w", i.Name, err)
		}
		if err := writeEntry(archive, blob(digest), raw); err != nil {
			return err
		}
	}
	return nil
}

func blob(digest v1.Hash) string { return "blobs/" + digest.Algorithm + "/" + digest.Hex }

func writeEntry(archive *tar.Writer, name string, content []byte) error {
	header := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content))}
	if err := archive.WriteHeader(header); err != nil {
		return fmt.Errorf("archiving %s: %w", name, err)
	}
	if _, err := archive.Write(content); err != nil {
		return fmt.Errorf("archiving %s: %w", name, err)
	}
	return nil
}
