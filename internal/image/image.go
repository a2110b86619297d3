// Package image defines the one spelling of an image reference. The allocator looks images up by it and agents report
// images by it, so both must use this package: two spellings of one image mean a pull that was not needed. Pure, except
// that it uses the reference grammar of github.com/distribution/reference. All functions may be called concurrently.
package image

import (
	"fmt"

	"github.com/distribution/reference"
)

// Normalize completes an image reference as Docker and containerd do: busybox becomes docker.io/library/busybox:latest. A
// digest alone identifies an image, so a tag beside it is dropped. The caller
// classifies the error, because it knows the field with the reference.
func Normalize(ref string) (string, error) {
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return "", fmt.Errorf("invalid image reference %q: %w", ref, err)
	}
	return named.String(), nil
}
