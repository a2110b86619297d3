package image

import (
	"archive/tar"
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
)

// mergedUsr makes /bin, /lib and the like links into /usr before any package is unpacked.
const mergedUsr = "/usr/share/mmdebstrap/hooks/merged-usr"

// rootfs is the layer of the distribution's packages, unpacked and without what is excluded. The unpacked packages are
// cached; a change of the description unpacks them again.
func (b Builder) rootfs(ctx context.Context, d Description) (v1.Layer, error) {
	release, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return nil, fmt.Errorf("finding the distribution's release: %w", err)
	}
	suite := codename(string(release))
	if suite == "" {
		return nil, errors.New("finding the distribution's release: /etc/os-release has no VERSION_CODENAME")
	}
	sum := sha256.Sum256([]byte(strings.Join(append([]string{suite, runtime.GOARCH}, d.Packages...), "\n")))
	cached := filepath.Join(b.CacheDir, "rootfs-"+hex.EncodeToString(sum[:8])+".tar")
	if _, err := os.Stat(cached); errors.Is(err, fs.ErrNotExist) {
		if err := unpackPackages(ctx, suite, d.Packages, cached); err != nil {
			return nil, err
		}
	}
	file, err := os.Open(cached)
	if err != nil {
		return nil, fmt.Errorf("opening the cached packages: %w", err)
	}
	defer func() { _ = file.Close() }()
	return filter(bufio.NewReaderSize(file, 1<<20), d.Exclude)
}

// unpackPackages has mmdebstrap unpack packages, without running their scripts, from the machine's own sources.
func unpackPackages(ctx context.Context, suite string, packages []string, target string) error {
	sources, err := aptSources()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
		return fmt.Errorf("making the cache: %w", err)
	}
	args := []string{
		"--mode=root", "--variant=extract", "--format=tar", "--quiet", "--include=" + strings.Join(packages, ","),
		`--aptopt=APT::Install-Recommends "false"`,
	}
	if _, err := os.Stat(mergedUsr); err == nil {
		args = append(args, "--hook-dir="+mergedUsr)
	}
	options, err := host.Run(ctx, "apt-config", "dump", "Acquire")
	if err != nil {
		return err
	}
	for line := range strings.Lines(options) {
		// Proxies, validity checks: the options that this machine needs to reach its package sources.
		if option := strings.TrimSuffix(strings.TrimSpace(line), ";"); !strings.HasSuffix(option, `""`) {
			args = append(args, "--aptopt="+option)
		}
	}
	part := target + ".part"
	defer func() { _ = os.Remove(part) }()
	if _, err := host.Run(ctx, "mmdebstrap", append(append(args, suite, part), sources...)...); err != nil {
		return err
	}
	return os.Rename(part, target)
}

// aptSources are the files that say where this machine gets its packages.
func aptSources() ([]string, error) {
	var found []string
	for _, pattern := range []string{"/etc/apt/sources.list", "/etc/apt/sources.list.d/*.list", "/etc/apt/sources.list.d/*.sources"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			return nil, fmt.Errorf("finding the package sources: %w", err)
		}
		for _, file := range files {
			if info, err := os.Stat(file); err == nil && info.Size() > 0 {
				found = append(found, file)
			}
		}
	}
	if len(found) == 0 {
		return nil, errors.New("finding the package sources: none in /etc/apt")
	}
	return found, nil
}

// codename is the VERSION_CODENAME of an os-release file.
func codename(release string) string {
	for line := range strings.Lines(release) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), "VERSION_CODENAME="); ok {
			return strings.Trim(value, `"`)
		}
	}
	return ""
}

// filter copies a tar into a layer: without excluded paths and devices, and with all times the epoch.
func filter(source io.Reader, exclude []string) (v1.Layer, error) {
	tree := newTree()
	reader := tar.NewReader(source)
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return tree.layer()
		}
		if err != nil {
			return nil, fmt.Errorf("reading the packages: %w", err)
		}
		name := path.Clean("/" + header.Name)
		device := header.Typeflag == tar.TypeChar || header.Typeflag == tar.TypeBlock || header.Typeflag == tar.TypeFifo
		if name == "/" || device || slices.ContainsFunc(exclude, func(prefix string) bool {
			return name == prefix || strings.HasPrefix(name, prefix+"/")
		}) {
			continue
		}
		clean := tar.Header{
			Typeflag: header.Typeflag, Name: name, Linkname: header.Linkname, Size: header.Size, Mode: header.Mode,
			Uid: header.Uid, Gid: header.Gid,
		}
		if header.Typeflag == tar.TypeLink {
			clean.Linkname = strings.TrimPrefix(path.Clean("/"+header.Linkname), "/")
		}
		if err := tree.add(clean, reader); err != nil {
			return nil, err
		}
	}
}
