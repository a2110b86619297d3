package cmd_test

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// krewManifest is what krew reads.
type krewManifest struct {
	APIVersion string                `json:"apiVersion"`
	Kind       string                `json:"kind"`
	Metadata   struct{ Name string } `json:"metadata"`
	Spec       struct {
		Version          string `json:"version"`
		ShortDescription string `json:"shortDescription"`
		Platforms        []struct {
			Selector struct {
				MatchLabels map[string]string `json:"matchLabels"`
			} `json:"selector"`
			URI    string `json:"uri"`
			Sha256 string `json:"sha256"`
			Bin    string `json:"bin"`
		} `json:"platforms"`
	} `json:"spec"`
}

func krew(t *testing.T, out, version, uri string) (string, error) {
	t.Helper()
	command := exec.CommandContext(t.Context(), ".ci/krew", out, version, uri)
	command.Dir = "../../.."
	text, err := command.CombinedOutput()
	return string(text), err
}

// TestKrewManifest fills in deploy/krew/fsb.yaml from stand-ins for the binaries.
func TestKrewManifest(t *testing.T) {
	out := t.TempDir()
	platforms := []string{"linux_amd64", "linux_arm64", "darwin_amd64", "darwin_arm64"}
	for _, p := range platforms {
		require.NoError(t, os.Mkdir(filepath.Join(out, p), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(out, p, "kubectl-fsb"), []byte(p), 0o755))
	}
	text, err := krew(t, out, "v1.2.3", "https://example.org/releases/")
	require.NoError(t, err, text)
	raw, err := os.ReadFile(filepath.Join(out, "fsb.yaml"))
	require.NoError(t, err)
	m := krewManifest{}
	require.NoError(t, yaml.Unmarshal(raw, &m))
	require.Equal(t, "Plugin", m.Kind)
	require.Equal(t, "fsb", m.Metadata.Name)
	require.Equal(t, "v1.2.3", m.Spec.Version)
	require.Less(t, len(m.Spec.ShortDescription), 60)
	require.Len(t, m.Spec.Platforms, len(platforms))
	for i, p := range m.Spec.Platforms {
		require.Equal(t, platforms[i], p.Selector.MatchLabels["os"]+"_"+p.Selector.MatchLabels["arch"])
		file := "kubectl-fsb_v1.2.3_" + platforms[i] + ".tar.gz"
		require.Equal(t, "https://example.org/releases/"+file, p.URI)
		archive, err := os.ReadFile(filepath.Join(out, file))
		require.NoError(t, err)
		sum := sha256.Sum256(archive)
		require.Equal(t, hex.EncodeToString(sum[:]), p.Sha256)
		unzipped, err := gzip.NewReader(strings.NewReader(string(archive)))
		require.NoError(t, err)
		contents := map[string]string{}
		for in := tar.NewReader(unzipped); ; {
			h, err := in.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err)
			content, err := io.ReadAll(in)
			require.NoError(t, err)
			contents[h.Name] = string(content)
		}
		require.Equal(t, platforms[i], contents[p.Bin])
		require.Contains(t, contents["LICENSE"], "Apache License")
	}
	for _, tc := range [][3]string{{out, "dev", "https://example.org"}, {out, "v1.2.3", "example.org"}, {t.TempDir(), "v1.2.3", "https://example.org"}} {
		text, err := krew(t, tc[0], tc[1], tc[2])
		require.Error(t, err, text)
	}
}
