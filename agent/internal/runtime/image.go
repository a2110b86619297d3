package runtime

import (
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/image"
)

// NormalizeImage is image.Normalize with an error that names the field `spec.image`.
func NormalizeImage(ref string) (string, error) {
	name, err := image.Normalize(ref)
	if err != nil {
		return "", fault.Field("spec.image", "%v", err)
	}
	return name, nil
}
