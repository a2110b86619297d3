package image_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/image"
)

func TestNormalize(t *testing.T) {
	digest := "@sha256:" + strings.Repeat("ab", 32)
	tests := map[string]struct{ ref, want string }{
		"short name":           {"busybox", "docker.io/library/busybox:latest"},
		"tag":                  {"busybox:1.36", "docker.io/library/busybox:1.36"},
		"organization":         {"fast-sandbox/python:demo", "docker.io/fast-sandbox/python:demo"},
		"old index name":       {"index.docker.io/library/busybox", "docker.io/library/busybox:latest"},
		"registry with a port": {"registry.example:5000/a/b:c", "registry.example:5000/a/b:c"},
		"digest":               {"busybox" + digest, "docker.io/library/busybox" + digest},
		"tag and digest":       {"busybox:1.36" + digest, "docker.io/library/busybox" + digest},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := image.Normalize(tt.ref)
			require.NoError(t, err)
			require.Equal(t, tt.want, got)
			again, err := image.Normalize(got)
			require.NoError(t, err)
			require.Equal(t, got, again, "the normal form of a normal form")
		})
	}
}

func TestNormalizeRefusesInvalidReferences(t *testing.T) {
	for _, ref := range []string{"", "Busybox", "busybox:", "busybox@sha256:ab", "a b", "/a"} {
		_, err := image.Normalize(ref)
		require.ErrorContains(t, err, "invalid image reference", "%q", ref)
	}
}
