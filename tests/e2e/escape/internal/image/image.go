// Package image builds the images of the suite in memory and imports them into the node's containerd: the one with the hostile
// program, that of the hostile agent, and those that are hostile themselves. They are never in a registry. All functions may be called
// concurrently.
package image

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
)

// Entry is a file in a layer.
type Entry struct {
	tar.Header
	Content []byte
}

// File returns a regular file.
func File(path, content string) Entry { return executable(path, []byte(content), 0o644) }

// Executable returns a program.
func Executable(path string, content []byte) Entry { return executable(path, content, 0o755) }

func executable(path string, content []byte, mode int64) Entry {
	return Entry{tar.Header{Typeflag: tar.TypeReg, Name: path, Mode: mode, Size: int64(len(content))}, content}
}

// Link returns a symbolic link, Hard a hard link.
func Link(path, target string) Entry {
	return Entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: path, Linkname: target, Mode: 0o777}}
}

// Hard returns a hard link.
func Hard(path, target string) Entry {
	return Entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: path, Linkname: target, Mode: 0o644}}
}

// Dir returns a directory.
func Dir(path string, mode int64) Entry {
	return Entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: path + "/", Mode: mode}}
}

// FIFO returns a named pipe.
func FIFO(path string) Entry {
	return Entry{Header: tar.Header{Typeflag: tar.TypeFifo, Name: path, Mode: 0o666}}
}

// Device returns a device.
func Device(path string, kind byte, major, minor int64) Entry {
	return Entry{Header: tar.Header{Typeflag: kind, Name: path, Mode: 0o666, Devmajor: major, Devminor: minor}}
}

// Image is an image to be imported.
type Image struct {
	// Ref is its reference.
	Ref string
	// User, Entrypoint and WorkingDir are those of its configuration.
	User       string
	Entrypoint []string
	// Layers are its layers, the lowest first.
	Layers [][]Entry
}

// capability is the extended attribute of a file whose effective and permitted set has CAP_SYS_ADMIN (VFS_CAP_REVISION_2).
const capability = "\x01\x00\x00\x02\x00\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// Base returns the entries of an image that runs the hostile program: three copies of it, of which two want to give it privileges, and the
// disks of the node.
func Base(program []byte) []Entry {
	caps := executable(strings.TrimPrefix(attack.FileCapabilities, "/"), program, 0o755)
	caps.PAXRecords = map[string]string{"SCHILY.xattr.security.capability": capability}
	entries := []Entry{
		Dir("etc", 0o755), Dir("tmp", 0o1777), Dir("proc", 0o755), Dir("sys", 0o755), Dir("dev", 0o755), Dir("root", 0o700), Dir("devices", 0o755),
		File("etc/passwd", "root:x:0:0:root:/root:/\nuser:x:1000:1000:user:/tmp:/\n"), File("etc/group", "root:x:0:\nuser:x:1000:\n"),
		executable(strings.TrimPrefix(attack.Program, "/"), program, 0o755),
		executable(strings.TrimPrefix(attack.SetUID, "/"), program, 0o4755), caps,
		Device("devices/mem", tar.TypeChar, 1, 1), Device("devices/kmsg", tar.TypeChar, 1, 11),
	}
	raw, _ := os.ReadFile("/proc/partitions")
	for line := range strings.Lines(string(raw)) {
		f := strings.Fields(line)
		if len(f) != 4 {
			continue
		}
		major, err1 := strconv.ParseInt(f[0], 10, 32)
		minor, err2 := strconv.ParseInt(f[1], 10, 32)
		if err1 == nil && err2 == nil {
			entries = append(entries, Device("devices/"+f[3], tar.TypeBlock, major, minor))
		}
	}
	return entries
}

// Build builds the image.
func (i Image) Build() (v1.Image, error) {
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{Architecture: runtime.GOARCH, OS: "linux", Config: v1.Config{
		User: i.User, Entrypoint: i.Entrypoint, Env: []string{"PATH=/"},
	}})
	if err != nil {
		return nil, fmt.Errorf("building %s: %w", i.Ref, err)
	}
	for _, entries := range i.Layers {
		raw, err := archive(entries)
		if err != nil {
			return nil, fmt.Errorf("building %s: %w", i.Ref, err)
		}
		layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(raw)), nil })
		if err != nil {
			return nil, fmt.Errorf("building %s: %w", i.Ref, err)
		}
		if img, err = mutate.AppendLayers(img, layer); err != nil {
			return nil, fmt.Errorf("building %s: %w", i.Ref, err)
		}
	}
	return img, nil
}

// archive writes the entries as they are: also those that no archiver would write.
func archive(entries []Entry) ([]byte, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		e.ModTime = time.Unix(0, 0)
		if err := w.WriteHeader(&e.Header); err != nil {
			return nil, err
		}
		if _, err := w.Write(e.Content); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}

// Import imports the image, without unpacking it: that is the agent's work.
func (i Image) Import(ctx context.Context, c *containerd.Client) error {
	img, err := i.Build()
	if err != nil {
		return err
	}
	tag, err := name.NewTag(i.Ref)
	if err != nil {
		return fmt.Errorf("importing %s: %w", i.Ref, err)
	}
	var buf bytes.Buffer
	if err := tarball.Write(tag, img, &buf); err != nil {
		return fmt.Errorf("importing %s: %w", i.Ref, err)
	}
	if _, err := c.Import(ctx, &buf, containerd.WithImageRefTranslator(func(string) string { return i.Ref })); err != nil {
		return fmt.Errorf("importing %s: %w", i.Ref, err)
	}
	return nil
}

// Unpack unpacks an imported image.
func Unpack(ctx context.Context, c *containerd.Client, ref string) (containerd.Image, error) {
	img, err := c.GetImage(ctx, ref)
	if err != nil {
		return nil, fmt.Errorf("unpacking %s: %w", ref, err)
	}
	if err := img.Unpack(ctx, ctrd.DefaultSnapshotter); err != nil {
		return nil, fmt.Errorf("unpacking %s: %w", ref, err)
	}
	return img, nil
}
