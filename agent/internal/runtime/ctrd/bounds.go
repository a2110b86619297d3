package ctrd

import (
	"errors"
	"fmt"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	// DefaultMaxImageBytes bounds what one pull downloads, compressed as it is.
	DefaultMaxImageBytes = 32 << 30
	// maxLayers is the largest number of layers: Docker builds no more, and overlayfs mounts at most 500.
	maxLayers = 128
	// maxBlobs is the largest number of blobs of one image, its indexes, manifests and configurations included.
	maxBlobs = 2 * maxLayers
)

// checkBlobs refuses the blobs of an image that are too large or too many to be what they are said to be.
func checkBlobs(image string, descs []ocispec.Descriptor) error {
	layers := 0
	for _, d := range descs {
		document := images.IsManifestType(d.MediaType) || images.IsIndexType(d.MediaType) || images.IsConfigType(d.MediaType)
		switch {
		case d.Size <= 0:
			return errImage(image, "the size of %s is %d", d.Digest, d.Size)
		case document && d.Size > shared.MaxDocument:
			return errImage(image, "%s has %d bytes, more than the %d that a manifest or a configuration may have", d.Digest, d.Size, shared.MaxDocument)
		case images.IsLayerType(d.MediaType):
			layers++
		}
	}
	if layers > maxLayers {
		return errImage(image, "it has %d layers, more than %d", layers, maxLayers)
	}
	return nil
}

// errImage is the error of an image that no sandbox can run.
func errImage(image, format string, args ...any) error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.ImageInvalid, "image %s cannot be used: %s", image, fmt.Sprintf(format, args...)).
		With("image", image)
}

// contentFault names the image in an error of reading its content.
func contentFault(err error, image, what string) error {
	var known *fault.Error
	if !errors.As(err, &known) {
		return classify(err, "reading %s of image %s", what, image)
	}
	if known.Reason() == fault.ImageInvalid && known.Metadata()["image"] == "" {
		return errImage(image, "%s", known.Message())
	}
	return err
}
