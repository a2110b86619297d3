package ctrd_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
)

const bundleDir = "/run/containerd/io.containerd.runtime.v2.task/k8s.io"

// escape writes a path as the kernel does in mountinfo.
func escape(path string) string {
	var out strings.Builder
	for _, b := range []byte(path) {
		if strings.IndexByte(" \t\n\\", b) >= 0 {
			fmt.Fprintf(&out, "\\%03o", b)
		} else {
			out.WriteByte(b)
		}
	}
	return out.String()
}

// FuzzMountinfo reads an arbitrary mountinfo, to which the kernel has added the mount of an arbitrary path. Every
// mount point that is found is within the bundles of a container, and the added one is found exactly if it is.
func FuzzMountinfo(f *testing.F) {
	line := "36 35 98:0 / " + bundleDir + "/u-1/rootfs rw,noatime master:1 - overlay overlay rw,lowerdir=/a\n"
	f.Add(line, bundleDir+"/u-2/rootfs")
	f.Add(line+"37 35 0:5 /\n", bundleDir+"/u-1/a b\tc\\040\n")
	f.Add("", bundleDir+"/../../etc")
	f.Add("36 35 98:0 / "+bundleDir+"\\057u-3/rootfs rw - ext4 /dev/x rw\n36 35 98:0 / \\777\\ rw\n", bundleDir)
	f.Add(strings.Repeat(line, 50), "/run/containerd")
	proc := f.TempDir()
	f.Fuzz(func(t *testing.T, text, path string) {
		if strings.ContainsAny(path, "\x00") || strings.ContainsAny(path, "\v\f\r\u0085\u00a0") {
			path = "/x" // not separators for the kernel; a container's id has none of them
		}
		text += "\n38 35 0:6 / " + escape(path) + " rw - tmpfs tmpfs rw\n"
		require.NoError(t, os.WriteFile(filepath.Join(proc, "mountinfo"), []byte(text), 0o600))
		points, err := ctrd.MountPoints(proc, bundleDir)
		require.NoError(t, err)
		require.LessOrEqual(t, len(points), strings.Count(text, "\n"))
		found := false
		for _, p := range points {
			require.True(t, strings.HasPrefix(p.Path, bundleDir+"/"), "%q", p.Path)
			require.True(t, strings.HasPrefix(p.Path+"/", bundleDir+"/"+p.ID+"/"), "%q of %q", p.Path, p.ID)
			require.NotContains(t, p.ID, "/")
			found = p.Path == path
		}
		if path != "" && len(strings.Fields(path)) > 0 {
			require.Equal(t, strings.HasPrefix(path, bundleDir+"/"), found, "%q", path)
		}
	})
}

// FuzzCgroupPath converts what an OCI spec names to a path. A path of systemd's form is below the slices that its name spells.
func FuzzCgroupPath(f *testing.F) {
	const pod = "pod0a1b2c3d-0000-4000-8000-0123456789ab"
	f.Add("/kubepods/besteffort/" + pod + "/fsb-u-1")
	f.Add("kubepods-besteffort-" + strings.ReplaceAll(pod, "-", "_") + ".slice:fsb:u-1")
	f.Add("-.slice:fsb:u")
	f.Add("../../a.slice:..:/x")
	f.Add("a--b.slice::")
	f.Fuzz(func(t *testing.T, value string) {
		path := ctrd.ExpandCgroup(value)
		parts := strings.Split(value, ":")
		if len(parts) != 3 || !strings.HasSuffix(parts[0], ".slice") {
			require.Equal(t, value, path)
			return
		}
		require.True(t, filepath.IsAbs(path))
		require.Equal(t, filepath.Clean(path), path, "it leads nowhere else")
		if strings.ContainsAny(value, "/") || strings.Contains(value, "..") {
			return
		}
		require.Equal(t, parts[1]+"-"+parts[2]+".scope", filepath.Base(path))
		require.Equal(t, parts[0], filepath.Base(filepath.Dir(path)))
		require.Equal(t, strings.Count(strings.TrimSuffix(parts[0], ".slice"), "-")+3, len(strings.Split(path, "/")))
	})
}

// FuzzPodOf finds the Pod's uid in a cgroup's path: a uid in the API server's form, which the path contains.
func FuzzPodOf(f *testing.F) {
	f.Add("/kubepods/besteffort/pod0a1b2c3d-0000-4000-8000-0123456789ab/fsb-u-1")
	f.Add("/kubepods.slice/kubepods-pod0a1b2c3d_0000_4000_8000_0123456789ab.slice/fsb-u-1.scope")
	f.Add("/podx/pod../fsb-u-1")
	f.Fuzz(func(t *testing.T, path string) {
		uid := ctrd.PodOf(path)
		if uid == "" {
			return
		}
		require.Contains(t, strings.ReplaceAll(path, "_", "-"), "pod"+uid)
		require.NotContains(t, uid, "/")
		require.NotContains(t, uid, "_")
	})
}
