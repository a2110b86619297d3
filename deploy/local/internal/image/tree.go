package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"path"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// tree writes the tar of a layer. All owners are root, all times the epoch, so that only content counts.
type tree struct {
	buffer bytes.Buffer
	writer *tar.Writer
	known  map[string]bool
}

func newTree() *tree {
	t := &tree{known: make(map[string]bool)}
	t.writer = tar.NewWriter(&t.buffer)
	return t
}

func (t *tree) file(name string, mode int64, content []byte) error {
	header := tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(content))}
	return t.add(header, bytes.NewReader(content))
}

func (t *tree) link(name, target string) error {
	return t.add(tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}, nil)
}

func (t *tree) directory(name string, mode int64) error {
	return t.add(tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: mode}, nil)
}

// add adds one entry, after the directories above it that are not there yet.
func (t *tree) add(header tar.Header, content io.Reader) error {
	name := strings.TrimPrefix(path.Clean(header.Name), "/")
	if header.Typeflag == tar.TypeDir && t.known[name] {
		return nil
	}
	if dir := path.Dir(name); dir != "." && !t.known[dir] {
		if err := t.directory(dir, 0o755); err != nil {
			return err
		}
	}
	t.known[name] = true
	header.Name = name
	if header.Typeflag == tar.TypeDir {
		header.Name += "/"
	}
	if err := t.writer.WriteHeader(&header); err != nil {
		return fmt.Errorf("adding %s: %w", name, err)
	}
	if content != nil {
		if _, err := io.Copy(t.writer, content); err != nil {
			return fmt.Errorf("adding %s: %w", name, err)
		}
	}
	return nil
}

func (t *tree) layer() (v1.Layer, error) {
	if err := t.writer.Close(); err != nil {
		return nil, fmt.Errorf("finishing a layer: %w", err)
	}
	sum := sha256.Sum256(t.buffer.Bytes())
	return &layer{data: t.buffer.Bytes(), hash: v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum[:])}}, nil
}

// layer is an uncompressed layer in memory. It travels through a local socket, so compressing it would only cost time;
// and its digest and its diff id are the same, computed once.
type layer struct {
	data []byte
	hash v1.Hash
}

func (l *layer) Digest() (v1.Hash, error)            { return l.hash, nil }
func (l *layer) DiffID() (v1.Hash, error)            { return l.hash, nil }
func (l *layer) Size() (int64, error)                { return int64(len(l.data)), nil }
func (l *layer) MediaType() (types.MediaType, error) { return types.OCIUncompressedLayer, nil }
func (l *layer) Compressed() (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(l.data)), nil
}
func (l *layer) Uncompressed() (io.ReadCloser, error) { return l.Compressed() }
