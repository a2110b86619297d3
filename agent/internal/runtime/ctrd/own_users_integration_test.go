//go:build integration

package ctrd_test

import (
	"os"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/seccomp"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// printed runs a container to its end, and returns what it printed and the directory of what it wrote.
func printed(t *testing.T, s *containerd.Server, r *ctrd.Runtime, c runtime.Container) (output, upper string) {
	t.Helper()
	require.NoError(t, launch(t.Context(), r, c))
	_, err := r.Wait(t.Context(), c.ID)
	require.NoError(t, err)
	mounts, err := s.Client.SnapshotService("overlayfs").Mounts(t.Context(), c.ID)
	require.NoError(t, err)
	for _, o := range mounts[0].Options {
		if dir, ok := strings.CutPrefix(o, "upperdir="); ok {
			upper = dir
		}
	}
	require.NoError(t, r.Finish(t.Context(), c.ID, c.Record))
	out, err := os.ReadFile(c.LogPath)
	require.NoError(t, err)
	return string(out), upper
}

// ownerOf returns the owner of a file on the node.
func ownerOf(t *testing.T, path string) uint32 {
	t.Helper()
	info, err := os.Lstat(path)
	require.NoError(t, err)
	st := info.Sys().(*syscall.Stat_t) //nolint:forcetypeassert // on Linux
	require.Equal(t, st.Uid, st.Gid, path)
	return st.Uid
}

// TestUserNamespaceFiles: files of an image, of the agent and of the sandbox have the owners that a program expects, and on the node none
// of them is root's.
func TestUserNamespaceFiles(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t, containerd.WithOwner("/home/app/file", 1000, 0o600), containerd.WithOwner("/bin/last", 65535, 0o4755)))
	r := newRuntime(t, s, mapped(t, s))
	const script = `
		stat -c '%n %u:%g %a' /bin/busybox /home/app/file /bin/last /etc/hostname /etc /dev/null /dev/stdout
		cat /etc/hostname; echo by name >/dev/stdout
		echo x >/made; touch /home/app/new; chmod 4755 /made; mkdir /etc/dir; stat -c '%n %u:%g %a' /made
		chown 65535 /home/app/new 2>&1 && stat -c '%n %u:%g' /home/app/new
		cat /home/app/file >/home/app/copy; rm /home/app/file; echo changed >>/bin/last; stat -c '%n %u:%g %a' /bin/last`
	var firsts []uint32
	for _, slot := range []bool{false, true} {
		b := box(t, s, slot, containerd.Busybox, "sh", "-c", strings.ReplaceAll(strings.ReplaceAll(script, "chown", "busybox chown"), "rm ", "busybox rm "))
		out, upper := printed(t, s, r, b)
		require.Equal(t, `/bin/busybox 0:0 755
/home/app/file 1000:1000 600
/bin/last 65535:65535 4755
/etc/hostname 0:0 644
/etc 0:0 755
/dev/null 0:0 666
/dev/stdout 0:0 777
box
by name
/made 0:0 4755
/home/app/new 65535:0
/bin/last 65535:65535 755
`, out)
		first := ownerOf(t, filepath.Join(upper, "made"))
		require.GreaterOrEqual(t, first, uint32(idrange.DefaultFirst))
		require.Equal(t, first, ownerOf(t, upper))
		require.Equal(t, first, ownerOf(t, filepath.Join(upper, "etc/dir")))
		require.Equal(t, first+65535, ownerOf(t, filepath.Join(upper, "bin/last")), "copied from the image with its owner")
		firsts = append(firsts, first)
		defer func() { require.NoError(t, r.Delete(t.Context(), b.ID)) }()
	}
	require.NotEqual(t, firsts[0], firsts[1], "no two sandboxes have the same users")
}

// TestUserNamespaceOfUnmappedFiles: a file of the host on a file system without id-mapped mounts, such as the /etc/hosts of a Pod on an old kernel's
// tmpfs, is there in a sandbox, and belongs to no user of it.
func TestUserNamespaceOfUnmappedFiles(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	dir := t.TempDir()
	require.NoError(t, unix.Mount("ramfs", dir, "ramfs", 0, "mode=755"))
	defer func() { require.NoError(t, unix.Unmount(dir, 0)) }()
	r := newRuntime(t, s, mapped(t, s))
	for _, slot := range []bool{false, true} {
		b := box(t, s, slot, containerd.Busybox, "sh", "-c", "cat /etc/hostname; stat -c '%u:%g %a' /etc/hostname; echo x 2>/dev/null >/etc/hostname || echo read-only")
		b.HostnamePath = filepath.Join(dir, b.ID)
		require.NoError(t, os.WriteFile(b.HostnamePath, []byte("box\n"), 0o644))
		out, _ := printed(t, s, r, b)
		require.Equal(t, "box\n65534:65534 644\nread-only\n", out)
		require.NoError(t, r.Delete(t.Context(), b.ID))
	}
}

// TestUserNamespacePorts: root in a network namespace of its own may use all its ports.
func TestUserNamespacePorts(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	b := box(t, s, false, containerd.Busybox, "sh", "-c", "(echo served | nc -l -p 80) & sleep 0.5; nc 127.0.0.1 80; wait")
	b.Network = runtime.NetworkNone
	out, _ := printed(t, s, r, b)
	require.Equal(t, "served\n", out)
	require.NoError(t, r.Delete(t.Context(), b.ID))
}

// TestUserNamespaceImages: an image with ids that a sandbox does not have is refused, and says which file has one.
func TestUserNamespaceImages(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, "docker.io/library/foreign:test", containerd.Image(t, containerd.WithOwner("/srv/file", 65536, 0o600)))
	s.Import(t, "docker.io/library/high:test", containerd.Image(t, containerd.WithUser("70000")))
	r, plain := newRuntime(t, s, mapped(t, s)), newRuntime(t, s, own(t, s))
	for image, text := range map[string]string{
		"docker.io/library/foreign:test": "/srv/file belongs to user 65536", "docker.io/library/high:test": "gives the image's user the id 70000",
	} {
		for _, slot := range []bool{false, true} {
			b := box(t, s, slot, image, "true")
			for range 2 { // what was found is remembered
				err := launch(t.Context(), r, b)
				require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
				require.Equal(t, fault.ImageInvalid, fault.ReasonOf(err))
				require.ErrorContains(t, err, text)
				require.NoError(t, r.Delete(t.Context(), b.ID))
				b = box(t, s, slot, image, "true")
			}
			require.NoError(t, launch(t.Context(), plain, b))
			require.NoError(t, plain.Delete(t.Context(), b.ID))
		}
	}
}

// TestUserNamespacesExhausted: the last range is taken, and with the end of its container it is free.
func TestUserNamespacesExhausted(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	change := mapped(t, s)
	r := newRuntime(t, s, func(c *ctrd.Config) { change(c); c.IDs.Count = 1 })
	last := started(t, s, r, 1)[0]
	for _, slot := range []bool{false, true} {
		b := box(t, s, slot, containerd.Busybox, "true")
		err := launch(t.Context(), r, b)
		require.True(t, errdefs.IsResourceExhausted(err), "%v", err)
		require.Equal(t, fault.NoCapacity, fault.ReasonOf(err))
		require.ErrorContains(t, err, "--user-id-ranges")
		require.NoError(t, r.Delete(t.Context(), b.ID))
	}
	require.NoError(t, r.Ping(t.Context()), "the agent is healthy")
	require.NoError(t, r.Delete(t.Context(), last))
	again := started(t, s, r, 1)[0]
	require.NoError(t, r.Delete(t.Context(), again))
}

// TestUserNamespacesAreSwept: an agent that was killed between a range and the record of its container has left the range. Its next process
// releases that, but none that is in use, and none of another agent.
func TestUserNamespacesAreSwept(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	change := mapped(t, s)
	mine := func(c *ctrd.Config) { change(c); c.PodUID = "agent" }
	first := newRuntime(t, s, func(c *ctrd.Config) { mine(c); c.CgroupParent = s.CgroupParent })
	used := started(t, s, first, 1)[0]
	lost, foreign := box(t, s, false, containerd.Busybox, "true"), box(t, s, false, containerd.Busybox, "true")
	ranges := s.Ranges(64)
	_, err := ranges.Take("agent", lost.ID)
	require.NoError(t, err)
	other, err := ranges.Take("another", foreign.ID)
	require.NoError(t, err)
	next := newRuntime(t, s, mine)
	states(t, next)
	held, err := ranges.List()
	require.NoError(t, err)
	ids := map[string]bool{}
	for _, h := range held {
		ids[h.ID] = true
	}
	require.Equal(t, map[string]bool{used: true, foreign.ID: true}, ids)
	require.NoError(t, ranges.Release(other, foreign.ID))
	require.NoError(t, next.Delete(t.Context(), used))
	require.NoError(t, os.RemoveAll(filepath.Dir(foreign.LogPath)))
}

// TestRangeOfALostContainer: the janitor finds a range whose container has no record, and releases it after the container's snapshot.
func TestRangeOfALostContainer(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	used := started(t, s, r, 1)[0]
	lost := box(t, s, false, containerd.Busybox, "true")
	require.NoError(t, os.RemoveAll(filepath.Dir(lost.LogPath)))
	ranges := s.Ranges(64)
	first, err := ranges.Take("16fd2706-8baf-433b-82eb-8c7fada847da", lost.ID)
	require.NoError(t, err)
	_, err = s.Client.SnapshotService(shared.DefaultSnapshotter).Prepare(t.Context(), lost.ID, "")
	require.NoError(t, err)
	remover := &shared.Remover{Client: s.Client, Snapshotter: shared.DefaultSnapshotter, LogRoot: s.LogRoot, ProcRoot: "/proc", Ranges: ranges}
	pieces, err := remover.InventoryExcept(t.Context(), map[string]bool{used: true})
	require.NoError(t, err)
	piece := shared.Piece{ID: lost.ID, Part: shared.PartRange, Path: strconv.FormatUint(uint64(first), 10), Owner: "16fd2706-8baf-433b-82eb-8c7fada847da"}
	require.Contains(t, pieces, piece)
	require.NoError(t, remover.RemovePiece(t.Context(), piece))
	require.NoError(t, remover.RemovePiece(t.Context(), piece), "safe to repeat")
	_, err = s.Client.SnapshotService(shared.DefaultSnapshotter).Stat(t.Context(), lost.ID)
	require.True(t, errdefs.IsNotFound(err), "%v", err)
	held, err := ranges.List()
	require.NoError(t, err)
	require.Len(t, held, 1)
	require.Equal(t, used, held[0].ID)
	piece.Path = "x"
	require.True(t, errdefs.IsInvalidArgument(remover.RemovePiece(t.Context(), piece)))
	require.NoError(t, r.Delete(t.Context(), used))
}

// TestWithoutIDMappedMounts is a kernel that has none. A pool that asks for user namespaces gets the reason, and containers without them; one
// that requires them gets none.
func TestWithoutIDMappedMounts(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	change := mapped(t, s)
	auto := newRuntime(t, s, func(c *ctrd.Config) { change(c); c.Users = ctrd.UsersAuto })
	required := newRuntime(t, s, change)
	done := make(chan error)
	go func() {
		goruntime.LockOSThread() // the thread ends with this function
		err := without("mount_setattr")
		if err == nil {
			auto.UsersOff()
			required.UsersOff()
		}
		done <- err
	}()
	require.NoError(t, <-done)
	require.Contains(t, auto.UsersOff(), "no id-mapped mounts")
	require.False(t, auto.Users())
	require.NoError(t, auto.Ping(t.Context()))
	for _, id := range started(t, s, auto, 2) {
		require.NoError(t, auto.Delete(t.Context(), id))
	}
	err := required.Ping(t.Context())
	require.Equal(t, fault.RuntimeUnavailable, fault.ReasonOf(err))
	require.ErrorContains(t, err, "the pool requires user namespaces")
	for _, slot := range []bool{false, true} {
		b := box(t, s, slot, containerd.Busybox, "true")
		err := launch(t.Context(), required, b)
		require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
		require.NoError(t, required.Delete(t.Context(), b.ID))
	}
}

// laterClock is the real clock, ahead by the duration that a test sets.
type laterClock struct {
	clock.RealClock

	ahead atomic.Int64
}

func (c *laterClock) Now() time.Time                  { return c.RealClock.Now().Add(time.Duration(c.ahead.Load())) }
func (c *laterClock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// TestUserNamespacesAreTriedAgain: the first try fails for a moment. Half a minute later containers have user namespaces, and a slot that was
// started without one is not claimed.
func TestUserNamespacesAreTriedAgain(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	change, later := mapped(t, s), &laterClock{}
	r := newRuntime(t, s, func(c *ctrd.Config) { change(c); c.Users, c.Clock = ctrd.UsersAuto, later })
	done := make(chan error)
	go func() {
		goruntime.LockOSThread() // the thread ends with this function
		err := without("mount_setattr")
		if err == nil {
			r.UsersOff()
		}
		done <- err
	}()
	require.NoError(t, <-done)
	old := box(t, s, true, containerd.Busybox, "sleep", "1000")
	require.NoError(t, startSlot(t.Context(), r, old))
	require.NoError(t, r.Ping(t.Context()))
	require.False(t, r.Users(), "too early")
	later.ahead.Store(int64(30 * time.Second))
	require.NoError(t, r.Ping(t.Context()))
	require.True(t, r.Users())
	require.Empty(t, r.UsersOff())
	err := r.Claim(t.Context(), old, func(runtime.Stage) {})
	require.ErrorIs(t, err, runtime.ErrSlotLost)
	require.NoError(t, r.Delete(t.Context(), old.ID))
	for _, id := range started(t, s, r, 2) {
		info, err := s.Client.ContainerService().Get(t.Context(), id)
		require.NoError(t, err)
		require.Contains(t, string(info.Spec.GetValue()), `"uidMappings"`)
		require.NoError(t, r.Delete(t.Context(), id))
	}
}

// without makes a system call fail, on this thread, as if the kernel did not know its arguments.
func without(name string) error {
	invalid := uint(unix.EINVAL)
	program, err := seccomp.Compile(&specs.LinuxSeccomp{
		DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{{Names: []string{name}, Action: specs.ActErrno, ErrnoRet: &invalid}},
	})
	if err != nil {
		return err
	}
	filter := unix.SockFprog{Len: uint16(len(program) / int(unsafe.Sizeof(unix.SockFilter{}))), Filter: (*unix.SockFilter)(unsafe.Pointer(&program[0]))}
	_, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&filter)))
	goruntime.KeepAlive(program)
	if errno != 0 {
		return errno
	}
	return nil
}
