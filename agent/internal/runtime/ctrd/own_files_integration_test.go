//go:build integration

package ctrd_test

import (
	"archive/tar"
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	files "github.com/fast-sandbox/fast-sandbox/agent/internal/files/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// asked makes a call of the helper of a user.
func asked(t *testing.T, s inside.Sandbox, user string, c *files.Call) (*files.Result, error) {
	t.Helper()
	h, err := s.Helper(t.Context(), user)
	require.NoError(t, err)
	defer h.Close()
	return h.Call(c)
}

// wrote writes a file.
func wrote(t *testing.T, s inside.Sandbox, user string, c *files.Call, data []byte) (*files.Result, error) {
	t.Helper()
	h, err := s.Helper(t.Context(), user)
	require.NoError(t, err)
	defer h.Close()
	c.Op = files.Write
	require.NoError(t, h.Begin(c))
	_ = h.Send(data)
	_ = h.End()
	return h.Answer()
}

// gotten reads the data that a call is answered with.
func gotten(t *testing.T, s inside.Sandbox, user string, c *files.Call) ([]byte, error) {
	t.Helper()
	h, err := s.Helper(t.Context(), user)
	require.NoError(t, err)
	defer h.Close()
	if _, err := h.Call(c); err != nil {
		return nil, err
	}
	var all []byte
	for {
		b, err := h.Data(nil)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		all = append(all, b...)
	}
}

func path(p string) []byte { return []byte(p) }

func reason(t *testing.T, err error) fault.Reason {
	t.Helper()
	require.Error(t, err)
	return fault.ReasonOf(inside.FileFault(err))
}

func TestInsideFiles(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, _ runtime.Container) {
		content := make([]byte, 3<<20+17)
		_, _ = rand.Read(content)
		r, err := wrote(t, s, "", &files.Call{Path: path("/data/deep/er/file"), Parents: true}, content)
		require.NoError(t, err)
		require.EqualValues(t, len(content), r.Bytes)
		require.Equal(t, "100644", fmt.Sprintf("%o", r.File.Mode))
		got, err := gotten(t, s, "", &files.Call{Op: files.Read, Path: path("/data/deep/er/file")})
		require.NoError(t, err)
		require.True(t, bytes.Equal(content, got))
		got, err = gotten(t, s, "", &files.Call{Op: files.Read, Path: path("/data/deep/er/file"), Offset: -20, Length: 10})
		require.NoError(t, err)
		require.Equal(t, content[len(content)-20:len(content)-10], got)
		out, _, _ := ran(t, s, shell("sha256sum < /data/deep/er/file | wc -c; stat -c '%U %a' /data/deep/er/file; ls -A /data/deep/er"))
		require.Equal(t, "68\nroot 644\nfile\n", out)

		// As another user, and what it may not do.
		_, err = wrote(t, s, "1000:1000", &files.Call{Path: path("/data/mine")}, content)
		require.Equal(t, fault.FileAccessDenied, reason(t, err))
		_, err = wrote(t, s, "1000:1000", &files.Call{Path: path("/tmp/mine")}, []byte("x"))
		require.NoError(t, err)
		out, _, _ = ran(t, s, shell("stat -c '%u:%g' /tmp/mine"))
		require.Equal(t, "1000:1000\n", out)
		_, err = wrote(t, s, "1000:1000", &files.Call{Path: path("/tmp/mine"), Owner: "0:0"}, []byte("x"))
		require.Equal(t, fault.FileAccessDenied, reason(t, err))

		// Conditions.
		f, err := asked(t, s, "", &files.Call{Op: files.Stat, Path: path("/tmp/mine")})
		require.NoError(t, err)
		_, err = wrote(t, s, "", &files.Call{Path: path("/tmp/mine"), Match: f.File.Etag}, []byte("second"))
		require.NoError(t, err)
		_, err = wrote(t, s, "", &files.Call{Path: path("/tmp/mine"), Match: f.File.Etag}, []byte("third"))
		require.Equal(t, fault.FileChanged, reason(t, err))
		_, err = wrote(t, s, "", &files.Call{Path: path("/tmp/mine"), NoReplace: true}, []byte("third"))
		require.Equal(t, fault.FileExists, reason(t, err))
		size := int64(3)
		_, err = wrote(t, s, "", &files.Call{Path: path("/tmp/mine"), Size: &size}, []byte("third"))
		require.Equal(t, fault.InvalidField, reason(t, err))
		out, _, _ = ran(t, s, shell("cat /tmp/mine; ls -A /tmp; stat -c '%u' /tmp/mine"))
		require.Equal(t, "secondmine\n1000\n", out, "replaced with its owner, and nothing is left")
		_, err = wrote(t, s, "", &files.Call{Path: path("/tmp/mine"), Append: true}, []byte("+"))
		require.NoError(t, err)

		// Names that are not text, and links.
		_, _, exit := ran(t, s, shell(`cd /data && touch "$(printf 'a\377b')" "$(printf 'new\nline')" && ln -s deep/er link && ln -s loop loop && ln -s /data/deep/er/file filelink`))
		require.Zero(t, exit.Code)
		list, err := asked(t, s, "", &files.Call{Op: files.List, Path: path("/data"), Depth: 5})
		require.NoError(t, err)
		var names []string
		for _, f := range list.Files {
			names = append(names, string(f.Path))
		}
		require.Equal(t, []string{"/data/a\xffb", "/data/deep", "/data/deep/er", "/data/deep/er/file", "/data/filelink", "/data/link", "/data/loop", "/data/new\nline"}, names)
		var paged []string
		for after := []byte(nil); ; {
			page, err := asked(t, s, "", &files.Call{Op: files.List, Path: path("/data"), Depth: 5, Limit: 3, After: after})
			require.NoError(t, err)
			for _, f := range page.Files {
				paged = append(paged, string(f.Path))
				after = f.Path
			}
			if !page.More {
				break
			}
		}
		require.Equal(t, names, paged)
		_, err = wrote(t, s, "", &files.Call{Path: path("/data/filelink")}, []byte("through the link"))
		require.NoError(t, err)
		got, err = gotten(t, s, "", &files.Call{Op: files.Read, Path: path("/data/deep/er/file")})
		require.NoError(t, err)
		require.Equal(t, "through the link", string(got))
		_, err = gotten(t, s, "", &files.Call{Op: files.Read, Path: path("/data/loop")})
		require.Equal(t, fault.FileConflict, reason(t, err))

		_, err = asked(t, s, "", &files.Call{Op: files.Move, Path: path("/data/deep"), NewPath: path("/data/moved")})
		require.NoError(t, err)
		_, err = asked(t, s, "", &files.Call{Op: files.Remove, Path: path("/data")})
		require.Equal(t, fault.FileConflict, reason(t, err))
		_, err = asked(t, s, "", &files.Call{Op: files.Remove, Path: path("/data"), Recursive: true})
		require.NoError(t, err)
		_, err = asked(t, s, "", &files.Call{Op: files.Stat, Path: path("/data")})
		require.Equal(t, fault.FileNotFound, reason(t, err))
		_, err = asked(t, s, "", &files.Call{Op: files.Remove, Path: path("/data"), MissingOK: true})
		require.NoError(t, err)
	})
}

// TestInsideFilesThatAreNone has files that programs wait for, or that the kernel makes up: each is refused at once.
func TestInsideFilesThatAreNone(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, _ runtime.Container) {
		_, _, exit := ran(t, s, shell("mkfifo /fifo && ln -s /proc/self/mem /link && ln -s /fifo /fifolink"))
		require.Zero(t, exit.Code)
		for _, p := range []string{"/fifo", "/fifolink", "/dev/null", "/dev/zero", "/dev/ptmx", "/proc/self/mem", "/proc/1/environ", "/proc/cpuinfo", "/link", "/etc", "/proc/self/fd/0"} {
			began := time.Now()
			_, err := gotten(t, s, "", &files.Call{Op: files.Read, Path: path(p)})
			require.Contains(t, []fault.Reason{fault.FileConflict, fault.FileAccessDenied}, reason(t, err), "%s: %v", p, err)
			_, err = wrote(t, s, "", &files.Call{Path: path(p)}, []byte("x"))
			require.Contains(t, []fault.Reason{fault.FileConflict, fault.FileAccessDenied, fault.FileNotFound}, reason(t, err), "%s: %v", p, err)
			require.Less(t, time.Since(began), testkit.Timeout/2, p)
		}
		for _, p := range []string{"", "a\x00b", strings.Repeat("/x", 4000)} {
			_, err := asked(t, s, "", &files.Call{Op: files.Stat, Path: path(p)})
			require.Equal(t, fault.InvalidField, reason(t, err), "%q", p)
		}
	})
}

func TestInsideWatch(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, _ runtime.Container) {
		_, _, _ = ran(t, s, shell("mkdir -p /w/sub"))
		h, err := s.Helper(t.Context(), "")
		require.NoError(t, err)
		defer h.Close()
		_, err = h.Call(&files.Call{Op: files.Watch, Path: path("/w"), Recursive: true})
		require.NoError(t, err)
		next := func() files.Event {
			raw, err := h.Data(nil)
			require.NoError(t, err)
			var e files.Event
			require.NoError(t, json.Unmarshal(raw, &e))
			return e
		}
		require.Equal(t, "started", next().Kind)
		_, _, _ = ran(t, s, shell("echo x > /w/sub/file; mkdir -p /w/new/deeper; echo y > /w/new/deeper/other; rm -r /w/sub"))
		seen := map[string]bool{}
		for !seen["written /w/new/deeper/other"] && !seen["created /w/new/deeper/other"] || !seen["removed /w/sub"] {
			e := next()
			seen[e.Kind+" "+string(e.Path)] = true
		}
		require.True(t, seen["written /w/sub/file"])
		require.True(t, seen["created /w/new"])
		_, _, _ = ran(t, s, shell("rm -r /w"))
		for {
			if e := next(); e.Kind == "removed" && string(e.Path) == "/w" {
				break
			}
		}
	})
}

func TestInsideArchives(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, _ runtime.Container) {
		_, _, exit := ran(t, s, shell("mkdir -p /src/dir && echo one > /src/a && echo two > /src/dir/b && chmod 750 /src/dir && ln -s ../a /src/dir/l && mkfifo /src/f"))
		require.Zero(t, exit.Code)
		archive, err := gotten(t, s, "", &files.Call{Op: files.ReadArchive, Path: path("/src")})
		require.NoError(t, err)
		unpack := func(to string, archive []byte) (*files.Result, error) {
			h, err := s.Helper(t.Context(), "")
			require.NoError(t, err)
			defer h.Close()
			require.NoError(t, h.Begin(&files.Call{Op: files.WriteArchive, Path: path(to)}))
			_ = h.Send(archive)
			_ = h.End()
			return h.Answer()
		}
		r, err := unpack("/dst", archive)
		require.NoError(t, err)
		require.EqualValues(t, 5, r.Count)
		out, _, _ := ran(t, s, shell("cat /dst/src/a /dst/src/dir/b /dst/src/dir/l; stat -c %a /dst/src/dir; ls /dst/src"))
		require.Equal(t, "one\ntwo\none\n750\na\ndir\n", out)

		_, _, _ = ran(t, s, shell("ln -s /etc /dst/out"))
		for name, headers := range map[string][]tar.Header{
			"dots":     {{Name: "../evil", Typeflag: tar.TypeReg}},
			"absolute": {{Name: "/evil", Typeflag: tar.TypeReg}},
			"a link":   {{Name: "out/evil", Typeflag: tar.TypeReg}},
			"own link": {{Name: "mine", Typeflag: tar.TypeSymlink, Linkname: "/"}, {Name: "mine/evil", Typeflag: tar.TypeReg}},
			"hardlink": {{Name: "hard", Typeflag: tar.TypeLink, Linkname: "../etc/passwd"}},
		} {
			var raw bytes.Buffer
			w := tar.NewWriter(&raw)
			for i := range headers {
				require.NoError(t, w.WriteHeader(&headers[i]))
			}
			require.NoError(t, w.Close())
			_, err := unpack("/dst", raw.Bytes())
			require.Equal(t, fault.InvalidField, reason(t, err), "%s: %v", name, err)
		}
		out, _, _ = ran(t, s, shell("ls /evil /etc/evil 2>/dev/null | wc -l"))
		require.Equal(t, "0\n", out)
		_, err = unpack("/dst", []byte("no archive, but longer than a block: "+strings.Repeat("x", 1024)))
		require.Equal(t, fault.InvalidField, reason(t, err))
	})
}

func TestInsideDial(t *testing.T) {
	forSandboxes(t, func(t *testing.T, s inside.Sandbox, _ runtime.Container) {
		listener, err := s.Start(t.Context(), shell("nc -l -p 18080 -e cat"))
		require.NoError(t, err)
		defer listener.Close()
		var h *inside.Helper
		require.Eventually(t, func() bool {
			h, err = s.Helper(t.Context(), "")
			require.NoError(t, err)
			if _, err = h.Call(&files.Call{Op: files.Dial, Port: 18080}); err == nil {
				return true
			}
			f, ok := errors.AsType[*files.Failure](err)
			require.True(t, ok, "%v", err)
			require.Equal(t, syscall.ECONNREFUSED, f.Errno)
			h.Close()
			return false
		}, testkit.Timeout, 20*time.Millisecond)
		defer h.Close()
		reader, conn := h.Stream()
		sent := strings.Repeat("across ", 100_000)
		go func() {
			_, _ = conn.Write([]byte(sent))
			_ = conn.CloseWrite()
		}()
		got, err := io.ReadAll(reader)
		require.NoError(t, err)
		require.Equal(t, sent, string(got))
	})
}
