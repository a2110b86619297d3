//go:build integration

package ctrd_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// hostileTimeout is much longer than any of these creates takes, and shorter than a call to containerd may.
const hostileTimeout = 20 * time.Second

// try creates and starts a container, and removes it.
func try(t *testing.T, s *containerd.Server, r *ctrd.Runtime, c runtime.Container) error {
	t.Helper()
	c.ID = uuid.NewString() + "-1"
	dir := filepath.Join(s.LogRoot, c.ID)
	require.NoError(t, os.MkdirAll(dir, 0o755))
	c.LogPath, c.HostnamePath = filepath.Join(dir, "output.log"), filepath.Join(dir, "hostname")
	require.NoError(t, os.WriteFile(c.LogPath, nil, 0o600))
	require.NoError(t, os.WriteFile(c.HostnamePath, []byte("h\n"), 0o600))
	record, err := anypb.New(durationpb.New(time.Minute))
	require.NoError(t, err)
	c.Record = record
	ctx, cancel := context.WithTimeout(t.Context(), hostileTimeout)
	defer cancel()
	err = r.Create(ctx, c, func(runtime.Stage) {})
	if err == nil {
		err = r.Start(ctx, c.ID)
	}
	require.NoError(t, ctx.Err(), "the create hangs: %v", err)
	require.NoError(t, r.Delete(t.Context(), c.ID))
	return err
}

// TestHostileUserFiles has images whose /etc/passwd or /etc/group must not be read, by the agent or by the OCI runtime.
func TestHostileUserFiles(t *testing.T) {
	s := containerd.Start(t)
	r := newRuntime(t, s, nil)
	for _, file := range []string{"/etc/passwd", "/etc/group"} {
		for name, option := range map[string]containerd.Option{
			"fifo":         containerd.WithFIFO(file),
			"device":       containerd.WithDevice(file),
			"directory":    containerd.WithDirectory(file),
			"huge":         containerd.WithFile(file, strings.Repeat("x:x:1:1:::\n", 1<<17), 0o644),
			"link-to-zero": containerd.WithLink(file, "/dev/zero"),
			"link-to-proc": containerd.WithLink(file, "../proc/self/fd/1"),
			"loop":         containerd.WithLink(file, filepath.Base(file)),
		} {
			t.Run(name+" "+file, func(t *testing.T) {
				ref := fmt.Sprintf("docker.io/library/%s-%s:test", filepath.Base(file), name)
				s.Import(t, ref, containerd.Image(t, option, containerd.WithUser("app")))
				begun := time.Now()
				err := try(t, s, r, runtime.Container{Image: ref, Command: []string{"true"}})
				require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
				require.Equal(t, fault.ImageInvalid, fault.ReasonOf(err))
				require.ErrorContains(t, err, ref)
				require.ErrorContains(t, err, file)
				require.Less(t, time.Since(begun), hostileTimeout/2)
			})
		}
	}
	// Links within the image are followed, also absolute ones.
	s.Import(t, "docker.io/library/linked:test", containerd.Image(t, containerd.WithFile("/nix/passwd", "app:x:7:7::/h:\n", 0o644),
		containerd.WithLink("/etc/passwd", "/nix/passwd"), containerd.WithUser("app")))
	require.NoError(t, try(t, s, r, runtime.Container{Image: "linked:test", Command: []string{"true"}}))
	s.CheckClean(t)
}

// TestHostilePaths has images with a FIFO, or a link out of the image, wherever else a create looks. Some of them cannot be run;
// no create hangs.
func TestHostilePaths(t *testing.T) {
	s := containerd.Start(t)
	r := newRuntime(t, s, nil)
	for i, c := range []struct {
		name    string
		option  containerd.Option
		request runtime.Container
		reason  fault.Reason
	}{
		// runc finds out after the start: the process exits.
		{"command", containerd.WithFIFO("/bin/pipe"), runtime.Container{Command: []string{"pipe"}}, ""},
		{"command by its path", containerd.WithFIFO("/pipe"), runtime.Container{Command: []string{"/pipe"}}, ""},
		{"working directory", containerd.WithFIFO("/pipe"), runtime.Container{Command: []string{"true"}, WorkingDir: "/pipe"}, fault.WorkingDirInvalid},
		{"below a FIFO", containerd.WithFIFO("/pipe"), runtime.Container{Command: []string{"true"}, WorkingDir: "/pipe/dir"}, fault.WorkingDirInvalid},
		{"host name", containerd.WithFIFO("/etc/hostname"), runtime.Container{Command: []string{"true"}}, ""},
		{"link in place of the host name", containerd.WithLink("/etc/hostname", "/../../../etc/none"), runtime.Container{Command: []string{"true"}}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.request.Image = fmt.Sprintf("docker.io/library/hostile-%d:test", i)
			s.Import(t, c.request.Image, containerd.Image(t, c.option))
			err := try(t, s, r, c.request)
			if c.reason == "" {
				require.NoError(t, err)
				return
			}
			require.Equal(t, c.reason, fault.ReasonOf(err), "%v", err)
		})
	}
	require.NoFileExists(t, "/etc/none")
	s.CheckClean(t)
}

// TestLinksInPlaceOfMountpoints has images with a link to a directory of the node where a container has its own /dev, /proc or /sys. runc
// 1.1 followed the one at /dev, and made links in the directory.
func TestLinksInPlaceOfMountpoints(t *testing.T) {
	s := containerd.Start(t)
	r := newRuntime(t, s, nil)
	node := t.TempDir()
	for _, name := range []string{"/dev", "/proc", "/sys"} {
		ref := fmt.Sprintf("docker.io/library/link%s:test", strings.ReplaceAll(name, "/", "-"))
		s.Import(t, ref, containerd.Image(t, containerd.WithLink(name, node)))
		err := try(t, s, r, runtime.Container{Image: ref, Command: []string{"true"}})
		left, readErr := os.ReadDir(node)
		require.NoError(t, readErr)
		require.Empty(t, left, "the create has written to the node")
		require.Equal(t, fault.ImageInvalid, fault.ReasonOf(err), "%v", err)
		require.ErrorContains(t, err, name+" is not a directory")
	}
	s.CheckClean(t)
}

// TestImageBounds pulls images that are too large in one way or another, and finds them on the node.
func TestImageBounds(t *testing.T) {
	s := containerd.Start(t)
	registry := containerd.NewRegistry(t, "", "", nil)
	r := newRuntime(t, s, func(c *ctrd.Config) { c.MaxImageBytes = 8 << 20 })
	noise := make([]byte, 9<<20) // no compression makes it smaller
	_, err := rand.NewChaCha8([32]byte{}).Read(noise)
	require.NoError(t, err)
	for name, c := range map[string]struct {
		image v1.Image
		want  string
		local bool // also if another client has pulled it
	}{
		"layers":        {containerd.Layers(t, 130), "131 layers, more than 128", true},
		"configuration": {containerd.Image(t, containerd.WithLabel("large", strings.Repeat("x", 1<<20))), "more than the 1048576", true},
		"zero byte":     {containerd.Image(t, containerd.WithEnv("A=\x00")), "zero byte", true},
		"size":          {containerd.Image(t, containerd.WithFile("/noise", string(noise), 0o644)), "larger than the 8388608 bytes", false},
	} {
		t.Run(name, func(t *testing.T) {
			name = strings.ReplaceAll(name, " ", "-")
			ref := registry.Push(t, name+":1", c.image)
			refuse := func(err error) {
				t.Helper()
				require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
				require.Equal(t, fault.ImageInvalid, fault.ReasonOf(err))
				require.ErrorContains(t, err, c.want)
				require.ErrorContains(t, err, name)
			}
			if _, err := r.Pull(t.Context(), ref, nil); name != "zero-byte" {
				refuse(err)
			}
			refuse(try(t, s, r, runtime.Container{Image: ref, Command: []string{"true"}}))
			if !c.local {
				return
			}
			local := "docker.io/library/" + name + ":local"
			s.ImportPacked(t, local, c.image)
			refuse(try(t, s, r, runtime.Container{Image: local, Command: []string{"true"}}))
		})
	}
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	_, err = r.Pull(ctx, registry.Push(t, "good:1", containerd.Image(t)), nil)
	require.NoError(t, err)
	s.CheckClean(t)
}
