package cmd_test

import (
	"archive/tar"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func copying(t *testing.T) (*harness, *fakeFiles) {
	t.Helper()
	f := newFiles(t)
	b := start(t, &fake{files: f})
	for _, dir := range []string{"tmp", "home", "srv"} {
		require.NoError(t, os.Mkdir(filepath.Join(f.root, dir), 0o755))
	}
	t.Chdir(t.TempDir())
	return b, f
}

// TestCopyToSandbox has each kind of source and destination of an upload.
func TestCopyToSandbox(t *testing.T) {
	for name, tc := range map[string]struct {
		source, destination string
		want                map[string]string // of /tmp and /home that were not there
	}{
		"file into directory":          {"file", "web:/tmp", map[string]string{"tmp/file": "one"}},
		"file into directory, slash":   {"./file", "web:/tmp/", map[string]string{"tmp/file": "one"}},
		"file to a new name":           {"file", "web:/tmp/new", map[string]string{"tmp/new": "one"}},
		"file over a file":             {"file", "web:/srv/old", map[string]string{"srv/old": "one"}},
		"relative to the home":         {"file", "web:new", map[string]string{"home/new": "one"}},
		"into the home":                {"file", "web:", map[string]string{"home/file": "one"}},
		"leading dash":                 {"-dash", "web:/tmp/", map[string]string{"tmp/-dash": "dash"}},
		"colon":                        {"./a:b", "web:/tmp/", map[string]string{"tmp/a:b": "colon"}},
		"newline and spaces":           {"new\nline and spaces", "web:/tmp/", map[string]string{"tmp/new\nline and spaces": "newline"}},
		"link on the command line":     {"link", "web:/tmp/", map[string]string{"tmp/link": "one"}},
		"empty file":                   {"empty", "web:/tmp/", map[string]string{"tmp/empty": ""}},
		"directory into directory":     {"dir", "web:/tmp/", map[string]string{"tmp/dir/": "", "tmp/dir/sub/": "", "tmp/dir/sub/x y\n": "deep", "tmp/dir/l": "-> sub"}},
		"directory to a new name":      {"dir/", "web:/tmp/new", map[string]string{"tmp/new/": "", "tmp/new/sub/": "", "tmp/new/sub/x y\n": "deep", "tmp/new/l": "-> sub"}},
		"new name with a slash":        {"dir", "web:/tmp/new/", map[string]string{"tmp/new/": "", "tmp/new/sub/": "", "tmp/new/sub/x y\n": "deep", "tmp/new/l": "-> sub"}},
		"contents of a directory":      {"dir/.", "web:/tmp", map[string]string{"tmp/sub/": "", "tmp/sub/x y\n": "deep", "tmp/l": "-> sub"}},
		"directory relative to home":   {"dir", "web:new", map[string]string{"home/new/": "", "home/new/sub/": "", "home/new/sub/x y\n": "deep", "home/new/l": "-> sub"}},
		"linked directory is followed": {"dirlink", "web:/tmp/", map[string]string{"tmp/dirlink/": "", "tmp/dirlink/sub/": "", "tmp/dirlink/sub/x y\n": "deep", "tmp/dirlink/l": "-> sub"}},
	} {
		t.Run(name, func(t *testing.T) {
			b, f := copying(t)
			put(t, filepath.Join(f.root, "srv/old"), "old content")
			put(t, "file", "one")
			put(t, "empty", "")
			put(t, "-dash", "dash")
			put(t, "a:b", "colon")
			put(t, "new\nline and spaces", "newline")
			put(t, "dir/sub/x y\n", "deep")
			require.NoError(t, os.Symlink("sub", "dir/l"))
			require.NoError(t, os.Symlink("file", "link"))
			require.NoError(t, os.Symlink("dir", "dirlink"))
			want := map[string]string{"tmp/": "", "home/": "", "srv/": "", "srv/old": "old content"}
			for k, v := range tc.want {
				want[k] = v
			}
			r := b.run(t, "cp", "--user", "app", "--", tc.source, tc.destination)
			require.Zero(t, r.code, r.err)
			require.Empty(t, r.out+r.err)
			require.Equal(t, want, tree(t, f.root))
			require.Contains(t, f.users, "app")
			for path, content := range tc.want {
				if st, err := os.Lstat(filepath.Join(f.root, path)); err == nil && content == "deep" {
					require.Equal(t, os.FileMode(0o640), st.Mode())
					require.Equal(t, int64(1e9), st.ModTime().Unix())
				}
			}
			for _, h := range f.wrote {
				require.Equal(t, uint32(0o640), h.GetMode())
				require.Equal(t, int64(1e9), h.GetModifyTime().GetSeconds())
				require.NotNil(t, h.SizeBytes)
				require.Equal(t, "app", h.GetUser())
			}
		})
	}
}

// TestCopyFromSandbox has each kind of source and destination of a download.
func TestCopyFromSandbox(t *testing.T) {
	dir := func(at string) map[string]string {
		return map[string]string{at + "/": "", at + "/sub/": "", at + "/sub/x y\n": "deep", at + "/l": "-> sub"}
	}
	for name, tc := range map[string]struct {
		source, destination string
		want                map[string]string
	}{
		"file into directory":        {"web:/srv/file", ".", map[string]string{"file": "one"}},
		"file to a new name":         {"web:/srv/file", "new", map[string]string{"new": "one"}},
		"file over a file":           {"web:/srv/file", "old", map[string]string{"old": "one"}},
		"file behind a link":         {"web:/srv/file", "oldlink", map[string]string{"old": "one"}},
		"local colon":                {"web:/srv/file", "./a:b", map[string]string{"a:b": "one"}},
		"leading dash":               {"web:/srv/-f", ".", map[string]string{"-f": "dash"}},
		"newline":                    {"web:/srv/dir/sub/x y\n", ".", map[string]string{"x y\n": "deep"}},
		"directory into directory":   {"web:/srv/dir", ".", dir("dir")},
		"directory to a new name":    {"web:/srv/dir/", "new", dir("new")},
		"new name with a slash":      {"web:/srv/dir", "new/", dir("new")},
		"contents":                   {"web:/srv/dir/.", "into", map[string]string{"into/sub/": "", "into/sub/x y\n": "deep", "into/l": "-> sub"}},
		"merged with what is there":  {"web:/srv/dir", "into", dir("into/dir")},
		"relative to the home":       {"web:mine", ".", map[string]string{"mine": "home"}},
		"relative to the home, long": {"web:~/mine", ".", map[string]string{"mine": "home"}},
	} {
		t.Run(name, func(t *testing.T) {
			b, f := copying(t)
			put(t, filepath.Join(f.root, "srv/file"), "one")
			put(t, filepath.Join(f.root, "srv/-f"), "dash")
			put(t, filepath.Join(f.root, "home/mine"), "home")
			put(t, filepath.Join(f.root, "srv/dir/sub/x y\n"), "deep")
			require.NoError(t, os.Symlink("sub", filepath.Join(f.root, "srv/dir/l")))
			put(t, "old", "old content")
			require.NoError(t, os.Symlink("old", "oldlink"))
			put(t, "into/kept", "kept")
			want := map[string]string{"old": "old content", "oldlink": "-> old", "into/": "", "into/kept": "kept"}
			for k, v := range tc.want {
				want[k] = v
			}
			r := b.run(t, "cp", tc.source, tc.destination)
			require.Zero(t, r.code, r.err)
			require.Empty(t, r.out+r.err)
			require.Equal(t, want, tree(t, "."))
			for path, content := range tc.want {
				if content == "one" || content == "deep" {
					st, err := os.Stat(path)
					require.NoError(t, err)
					require.Equal(t, os.FileMode(0o640), st.Mode())
					require.Equal(t, int64(1e9), st.ModTime().Unix())
				}
			}
		})
	}
}

func TestCopyStreams(t *testing.T) {
	b, f := copying(t)
	b.in = strings.Repeat("input\n", 100_000)
	r := b.run(t, "cp", "-", "web:/tmp/in")
	require.Zero(t, r.code, r.err)
	require.Equal(t, b.in, tree(t, f.root)["tmp/in"])
	require.Nil(t, f.wrote[0].Mode)
	require.Nil(t, f.wrote[0].SizeBytes)
	r = b.run(t, "cp", "web:/tmp/in", "-")
	require.Zero(t, r.code, r.err)
	require.Equal(t, b.in, r.out)

	// A FIFO, as from <(command) of a shell, and a device.
	require.NoError(t, unix.Mkfifo("fifo", 0o600))
	go func() { _ = os.WriteFile("fifo", []byte("piped"), 0o600) }()
	require.Zero(t, b.run(t, "cp", "fifo", "web:/tmp/").code)
	require.Equal(t, "piped", tree(t, f.root)["tmp/fifo"])
	require.Zero(t, b.run(t, "cp", "web:/tmp/in", "/dev/null").code)
	st, err := os.Stat("/dev/null")
	require.NoError(t, err)
	require.NotZero(t, st.Mode()&os.ModeDevice, "it is still the device")
}

// TestCopyRefuses has what a copy cannot do. Nothing is changed on either side.
func TestCopyRefuses(t *testing.T) {
	b, f := copying(t)
	put(t, filepath.Join(f.root, "srv/file"), "one")
	put(t, filepath.Join(f.root, "srv/dir/x"), "deep")
	put(t, filepath.Join(f.root, "tmp/dir"), "a file")
	require.NoError(t, os.Mkdir(filepath.Join(f.root, "tmp/here"), 0o755))
	put(t, "here", "here")
	put(t, "into/dir", "a file")
	put(t, "up/x", "x")
	require.NoError(t, os.MkdirAll("into/file", 0o755))
	require.NoError(t, os.Symlink("nothing", "dangling"))
	before, local := tree(t, f.root), tree(t, ".")
	for line, tc := range map[string]struct {
		code int
		want string
	}{
		"here there":                        {2, "neither \"here\" nor \"there\" is in a sandbox"},
		"- -":                               {2, "neither"},
		"web:/srv/file two:/tmp/":           {2, "fsb-ctl cp web:/srv/file - | fsb-ctl cp - two:/tmp/"},
		"here Web:/tmp":                     {2, `for a local file with a colon in its name, write ./Web:/tmp`},
		"web:/\xff .":                       {2, "not valid UTF-8"},
		"here":                              {2, "DESTINATION is missing"},
		"a b web:/tmp":                      {2, "unexpected argument"},
		"here gone:/tmp":                    {3, "SANDBOX_NOT_FOUND"},
		"gone web:/tmp":                     {3, "LOCAL_FILE_NOT_FOUND"},
		"dangling web:/tmp":                 {3, "LOCAL_FILE_NOT_FOUND"},
		"web:/srv/none .":                   {3, "FILE_NOT_FOUND"},
		"here web:/none/x":                  {5, `the directory "/none" does not exist in sandbox "web"`},
		"here web:/none/":                   {5, `the directory "/none/" does not exist`},
		"here web:/srv/file/x":              {5, "FILE_CONFLICT"},
		"here web:/tmp":                     {5, "FILE_CONFLICT"}, // there is a directory with the name
		"up web:/srv/file":                  {5, `"/srv/file" in sandbox "web" is not a directory`},
		"- web:/tmp":                        {5, "is a directory: name the file"},
		"web:/srv -":                        {5, "standard output takes a file"},
		"web:/srv/file none/x":              {5, `the directory "none" does not exist`},
		"web:/srv/file none/":               {5, `the directory "none/" does not exist`},
		"web:/srv/file into":                {5, `"into/file" exists`},
		"web:/srv/dir into":                 {5, `"into/dir" exists`},
		"web:/srv/dir here":                 {5, `"here" is not a directory`},
		"web:/srv/file dangling":            {5, "a symbolic link to nothing"},
		"web:/" + strings.Repeat("x", 5000): {2, "DESTINATION is missing"},
		"web:/" + strings.Repeat("x", 5000) + " .": {2, "longer than 4095"},
	} {
		t.Run(line, func(t *testing.T) {
			r := b.run(t, append([]string{"cp", "--"}, strings.Fields(line)...)...)
			require.Equal(t, tc.code, r.code, r.err)
			require.Contains(t, r.err, tc.want)
			require.Equal(t, local, tree(t, "."))
			require.Equal(t, before, tree(t, f.root))
		})
	}
}

// TestCopyRefusesArchives has a sandbox that sends what leads out of the destination. Each refusal names the entry.
func TestCopyRefusesArchives(t *testing.T) {
	outside := t.TempDir()
	for name, tc := range map[string]struct {
		headers []tar.Header
		want    string
	}{
		"absolute":              {[]tar.Header{{Typeflag: tar.TypeReg, Name: "/etc/evil"}}, `absolute path: "/etc/evil"`},
		"parent":                {[]tar.Header{{Typeflag: tar.TypeReg, Name: "dir/../../evil"}}, `leads out of the destination: "dir/../../evil"`},
		"harmless parent":       {[]tar.Header{{Typeflag: tar.TypeReg, Name: "dir/a/../b"}}, `"dir/a/../b"`},
		"another name":          {[]tar.Header{{Typeflag: tar.TypeReg, Name: "other/evil"}}, `was not asked for: "other/evil"`},
		"similar name":          {[]tar.Header{{Typeflag: tar.TypeReg, Name: "dirx/evil"}}, `was not asked for: "dirx/evil"`},
		"character device":      {[]tar.Header{{Typeflag: tar.TypeChar, Name: "dir/null", Devmajor: 1, Devminor: 3}}, `is a device: "dir/null"`},
		"block device":          {[]tar.Header{{Typeflag: tar.TypeBlock, Name: "dir/sda"}}, `is a device: "dir/sda"`},
		"FIFO":                  {[]tar.Header{{Typeflag: tar.TypeFifo, Name: "dir/p"}}, `is a FIFO: "dir/p"`},
		"hard link":             {[]tar.Header{{Typeflag: tar.TypeLink, Name: "dir/h", Linkname: "/etc/passwd"}}, `is a hard link: "dir/h"`},
		"file in its place":     {[]tar.Header{{Typeflag: tar.TypeReg, Name: "dir"}}, `is not the directory`},
		"link in its place":     {[]tar.Header{{Typeflag: tar.TypeSymlink, Name: "dir", Linkname: outside}}, `is not the directory`},
		"through its own link":  {[]tar.Header{{Typeflag: tar.TypeSymlink, Name: "dir/l", Linkname: outside}, {Typeflag: tar.TypeReg, Name: "dir/l/evil"}}, ``},
		"through a link inside": {[]tar.Header{{Typeflag: tar.TypeSymlink, Name: "dir/l", Linkname: "sub"}, {Typeflag: tar.TypeReg, Name: "dir/l/evil"}}, `unpacking "l": it exists and is a directory`},
		"through a local link":  {[]tar.Header{{Typeflag: tar.TypeReg, Name: "dir/out/evil"}}, `by a symbolic link: "dir/out/evil"`},
		"local link, directory": {[]tar.Header{{Typeflag: tar.TypeDir, Name: "dir/out/"}}, `by a symbolic link: "dir/out/"`},
	} {
		t.Run(name, func(t *testing.T) {
			b, f := copying(t)
			require.NoError(t, os.Mkdir(filepath.Join(f.root, "srv/dir"), 0o755))
			require.NoError(t, os.Mkdir("dir", 0o755))
			require.NoError(t, os.Symlink(outside, "dir/out"))
			f.archive = tarOf(t, append([]tar.Header{{Typeflag: tar.TypeReg, Name: "dir/good"}}, tc.headers...)...)
			r := b.run(t, "cp", "web:/srv/dir", ".")
			if tc.want == "" {
				require.Zero(t, r.code, r.err)
			} else {
				require.Equal(t, 5, r.code, r.err)
				require.Contains(t, r.err, tc.want)
			}
			require.Empty(t, tree(t, outside))
			require.NoFileExists(t, "../evil")
			now := tree(t, ".")
			require.Equal(t, "dir/good", now["dir/good"])
			for path := range now {
				require.NotContains(t, path, ".fsb-", "a temporary file is left")
			}
		})
	}
	t.Run("cut off", func(t *testing.T) {
		b, f := copying(t)
		require.NoError(t, os.Mkdir(filepath.Join(f.root, "srv/dir"), 0o755))
		f.archive = tarOf(t, tar.Header{Typeflag: tar.TypeReg, Name: "dir/good"})[:515]
		r := b.run(t, "cp", "web:/srv/dir", ".")
		require.Equal(t, 5, r.code, r.err)
		require.Empty(t, tree(t, "."))
	})
}

// TestCopyLeavesOutLinksThatLeadOutside: with the other entries the copy is complete.
func TestCopyLeavesOutLinksThatLeadOutside(t *testing.T) {
	b, f := copying(t)
	require.NoError(t, os.MkdirAll(filepath.Join(f.root, "srv/dir/a/b"), 0o755))
	links := map[string]string{
		"abs": "/etc/passwd", "up": "../../x", "a/up2": "../..", "in": "a/b", "a/in": "../in", "dangling": "later",
		"a/b/root": "../..", "z": "a/b/root/..", // inside by its text, outside by where it leads
		"y": "in/../../..",
	}
	for name, target := range links {
		require.NoError(t, os.Symlink(target, filepath.Join(f.root, "srv/dir", name)))
	}
	r := b.run(t, "cp", "web:/srv/dir", ".")
	require.Zero(t, r.code, r.err)
	require.Equal(t, map[string]string{
		"dir/": "", "dir/a/": "", "dir/a/b/": "", "dir/in": "-> a/b", "dir/a/in": "-> ../in", "dir/dangling": "-> later", "dir/a/b/root": "-> ../..",
	}, tree(t, "."))
	for _, name := range []string{"abs", "up", "a/up2", "z", "y"} {
		require.Contains(t, r.err, `the symbolic link "`+name+`" is not copied`)
	}
	require.Equal(t, 5, strings.Count(r.err, "\n"))
}
