package runtime

import (
	"github.com/distribution/reference"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// NormalizeImage completes an image reference as Docker does: `busybox` -> `docker.io/library/busybox:latest`. A
// reference that cannot be read is InvalidArgument naming the field `spec.image`.
func NormalizeImage(ref string) (string, error) {
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return "", fault.Field("spec.image", "%q is no image reference: %v", ref, err)
	}
	return named.String(), nil
}
