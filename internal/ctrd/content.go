package ctrd

import (
	"context"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// MaxDocument is the largest blob, in bytes, that a client made by Dial reads from containerd: an index, a manifest or a
// configuration of an image. They are read into memory, and decoding may take many times as much.
const MaxDocument = 1 << 20

// documents is a content store from which only documents are read: containerd itself reads the layers. What a manifest says
// about a blob's size is no bound: the blob may be on the node already, with another size.
type documents struct{ content.Store }

// ReaderAt refuses a blob that is too large to be a document.
func (d documents) ReaderAt(ctx context.Context, desc ocispec.Descriptor) (content.ReaderAt, error) {
	r, err := d.Store.ReaderAt(ctx, desc)
	if err != nil {
		return nil, err
	}
	if size := r.Size(); size > MaxDocument {
		_ = r.Close()
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.ImageInvalid,
			"%s, which should be a manifest or a configuration, has %d bytes, more than the %d allowed", desc.Digest, size, MaxDocument)
	}
	return r, nil
}
