package ctrd_test

import (
	"context"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// blob is a content store with one blob.
type blob struct {
	content.Store
	*strings.Reader

	closed bool
}

func (b *blob) ReaderAt(context.Context, ocispec.Descriptor) (content.ReaderAt, error) {
	return reader{b.Reader, b}, nil
}

type reader struct {
	*strings.Reader

	blob *blob
}

func (r reader) Close() error { r.blob.closed = true; return nil }

// TestDocumentsAreBounded has descriptors that lie about the size of a blob that is on the node.
func TestDocumentsAreBounded(t *testing.T) {
	small, large := &blob{Reader: strings.NewReader(strings.Repeat("x", ctrd.MaxDocument))}, &blob{Reader: strings.NewReader(strings.Repeat("x", ctrd.MaxDocument+1))}
	raw, err := content.ReadBlob(t.Context(), ctrd.Documents(small), ocispec.Descriptor{Digest: "d", Size: 1})
	require.NoError(t, err)
	require.Len(t, raw, ctrd.MaxDocument)
	_, err = content.ReadBlob(t.Context(), ctrd.Documents(large), ocispec.Descriptor{Digest: "d", Size: 1})
	require.True(t, errdefs.IsFailedPrecondition(err))
	require.Equal(t, fault.ImageInvalid, fault.ReasonOf(err))
	require.True(t, large.closed)
}
