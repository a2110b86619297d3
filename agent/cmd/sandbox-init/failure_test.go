//go:build integration

package main_test

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

const exitAbandoned, exitFailed = 125, 126

// TestFailures makes each stage fail. The failure names the stage, and no process is left.
func TestFailures(t *testing.T) {
	link := func(name, target string) func(string) {
		return func(dir string) {
			_ = os.Remove(filepath.Join(dir, name))
			if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
				panic(err)
			}
		}
	}
	big := strings.Repeat("x", 200<<10)
	for _, c := range []struct {
		name   string
		image  func(dir string)
		change func(c *claim.Claim)
		stage  claim.Stage
		errno  syscall.Errno
		reason fault.Reason
	}{
		{"a command that is not in PATH", nil, func(c *claim.Claim) { c.Args = []string{"nope"} }, wire.StageLookup, syscall.ENOENT, fault.CommandNotFound},
		{"a command without a PATH", nil, func(c *claim.Claim) { c.Env = nil }, wire.StageLookup, syscall.ENOENT, fault.CommandNotFound},
		{"a command that is not there", nil, func(c *claim.Claim) { c.Args = []string{"/no/such"} }, wire.StageLookup, syscall.ENOENT, fault.CommandNotFound},
		{"a command below a file", nil, func(c *claim.Claim) { c.Args = []string{"/data/x"} }, wire.StageLookup, syscall.ENOTDIR, fault.CommandNotFound},
		{"a relative command", nil, func(c *claim.Claim) { c.Args = []string{"./nope"} }, wire.StageLookup, syscall.ENOENT, fault.CommandNotFound},
		{"a command that is not executable", nil, func(c *claim.Claim) { c.Args = []string{"/data"} }, wire.StageLookup, syscall.EACCES, fault.CommandNotExecutable},
		{"a command that is a directory", nil, func(c *claim.Claim) { c.Args = []string{"/bin"} }, wire.StageLookup, syscall.EACCES, fault.CommandNotExecutable},
		{"a command of another user", func(dir string) { _ = os.Chmod(filepath.Join(dir, "bin/sh"), 0o700) }, func(c *claim.Claim) {
			c.UID, c.Capabilities = 1000, claim.Capabilities{Bounding: capabilities}
		}, wire.StageLookup, syscall.EACCES, fault.CommandNotExecutable},
		{"a command that is not a program", nil, func(c *claim.Claim) { c.Args = []string{"garbage"} }, wire.StageExec, syscall.ENOEXEC, fault.CommandNotExecutable},
		{"a script without its interpreter", nil, func(c *claim.Claim) { c.Args = []string{"orphan"} }, wire.StageExec, syscall.ENOENT, fault.CommandNotFound},
		{"an argument that is too long", nil, func(c *claim.Claim) { c.Args = append(c.Args, big) }, wire.StageExec, syscall.E2BIG, fault.InvalidField},
		{"an environment that is too large", nil, func(c *claim.Claim) {
			for range 7 << 10 {
				c.Env = append(c.Env, "K="+big[:1000])
			}
		}, wire.StageExec, syscall.E2BIG, fault.InvalidField},
		{"a working directory that is a file", nil, func(c *claim.Claim) { c.Cwd = "/data" }, wire.StageCwd, syscall.ENOTDIR, fault.WorkingDirInvalid},
		{"a working directory below a file", nil, func(c *claim.Claim) { c.Cwd = "/data/x" }, wire.StageCwd, syscall.ENOTDIR, fault.WorkingDirInvalid},
		{"a working directory by a file descriptor", nil, func(c *claim.Claim) { c.Cwd = "/proc/self/fd/5" }, wire.StageCwd, syscall.ENOENT, fault.WorkingDirInvalid},
		{"/proc that is a link", link("proc", "/tmp"), nil, wire.StageRoot, syscall.ENOTDIR, ""},
		{"/dev that is a file", func(dir string) { _ = os.WriteFile(filepath.Join(dir, "dev"), nil, 0o644) }, nil, wire.StageRoot, syscall.ENOTDIR, ""},
		{"a mount of a missing file", nil, func(c *claim.Claim) {
			c.Mounts = []claim.Mount{{Destination: "/x", Path: "/fsb/nope"}}
		}, wire.StageMount, syscall.ENOENT, ""},
		{"a mount that a link leads into /proc", link("etc/hostname", "/proc/sys/kernel/hostname"), nil, wire.StageMount, syscall.EPERM, ""},
		{"a mount that a magic link leads away", link("etc/hostname", "/proc/self/root/etc/x"), nil, wire.StageMount, syscall.ELOOP, ""},
		{"a mount that a link leads to /sys", link("etc/hostname", "/sys/kernel/profiling"), nil, wire.StageMount, syscall.EPERM, ""},
		{"a mount over the root", nil, func(c *claim.Claim) { c.Mounts[0].Destination = "/etc/.." }, wire.StageMount, syscall.EPERM, ""},
		{"a file mounted over a directory", nil, func(c *claim.Claim) { c.Mounts[0].Destination = "/etc" }, wire.StageMount, syscall.EINVAL, ""},
		{"a mount through a loop of links", link("etc/hostname", "hostname"), nil, wire.StageMount, syscall.ELOOP, ""},
		{"a limit above itself", nil, func(c *claim.Claim) {
			c.Rlimits = []claim.Rlimit{{Resource: unix.RLIMIT_NOFILE, Soft: 20, Hard: 10}}
		}, wire.StageRlimit, syscall.EINVAL, ""},
		{"an invalid filter", nil, func(c *claim.Claim) { c.Seccomp = make([]byte, 16) }, wire.StageSeccomp, syscall.EINVAL, ""},
		{"a capability that the slot lacks", nil, func(c *claim.Claim) { c.Capabilities.Permitted |= 1 << unix.CAP_SYS_BOOT }, wire.StageCapability, syscall.EPERM, ""},
		{"an ambient capability that is not inheritable", nil, func(c *claim.Claim) { c.Capabilities.Ambient = 1 }, wire.StageCapability, syscall.EPERM, ""},
		{"an invalid oom score", nil, func(c *claim.Claim) { n := int32(5000); c.OOMScoreAdj = &n }, wire.StageOOM, syscall.EINVAL, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := start(t)
			what := newClaim(t, 0, "sh", "-c", "echo it ran")
			if c.change != nil {
				c.change(what)
			}
			conn := s.connect(t)
			err := conn.Send(deadline(t), what, mount(t, image(t, c.image)))
			if err == nil {
				err = conn.Go(deadline(t))
			}
			var f *claim.Failure
			require.ErrorAs(t, err, &f)
			require.Equal(t, c.stage, f.Stage, "%v", f)
			require.Equal(t, c.errno, f.Errno, "%v", f)
			require.Equal(t, c.reason, fault.ReasonOf(claim.Fault(err, what.Args[0])))
			require.NoError(t, conn.Close())
			require.Equal(t, exitFailed, s.wait(t).ExitStatus())
			require.NotContains(t, s.text(t), "it ran")
			s.clean(t)
		})
	}
}

func TestUnknownAppArmorProfile(t *testing.T) {
	if _, err := os.Stat("/sys/kernel/security/apparmor"); err == nil {
		t.Log("this host has AppArmor: the profile does not exist")
	}
	s := start(t)
	conn := s.connect(t)
	what := newClaim(t, 0, "sh")
	what.AppArmorProfile = "fsb-no-such-profile"
	require.NoError(t, conn.Send(deadline(t), what, mount(t, image(t, nil))))
	var f *claim.Failure
	require.ErrorAs(t, conn.Go(deadline(t)), &f)
	require.Equal(t, wire.StageAppArmor, f.Stage)
	require.Equal(t, exitFailed, s.wait(t).ExitStatus())
}

func TestRootThatIsNotAMount(t *testing.T) {
	s := start(t)
	null, err := os.Open("/dev/null")
	require.NoError(t, err)
	defer func() { _ = null.Close() }()
	var f *claim.Failure
	require.ErrorAs(t, s.connect(t).Send(deadline(t), newClaim(t, 0, "sh"), int(null.Fd())), &f)
	require.Equal(t, wire.StageRoot, f.Stage)
	require.Equal(t, exitFailed, s.wait(t).ExitStatus())
}

// TestSlotEndsWithItsAgent closes the connection at each point before the command runs.
func TestSlotEndsWithItsAgent(t *testing.T) {
	t.Run("before the claim", func(t *testing.T) {
		s := start(t)
		require.NoError(t, s.connect(t).Close())
		require.Equal(t, exitAbandoned, s.wait(t).ExitStatus())
	})
	t.Run("before go", func(t *testing.T) {
		s := start(t)
		conn := s.connect(t)
		require.NoError(t, conn.Send(deadline(t), newClaim(t, 0, "sh", "-c", "echo it ran"), mount(t, image(t, nil))))
		require.NoError(t, conn.Close())
		require.Equal(t, exitAbandoned, s.wait(t).ExitStatus())
		require.Empty(t, s.text(t))
	})
	t.Run("within the claim", func(t *testing.T) {
		s := start(t)
		conn := s.raw(t)
		_, err := conn.Write(wire.AppendHeader(nil, wire.TypeClaim, 1000))
		require.NoError(t, err)
		require.NoError(t, conn.Close())
		require.Equal(t, exitAbandoned, s.wait(t).ExitStatus())
	})
}

// raw connects without a Conn, and reads the hello.
func (c *container) raw(t *testing.T) *net.UnixConn {
	t.Helper()
	// Not claim.Await: the slot takes only one connection.
	path := filepath.Join(c.fsb, claim.SocketName)
	for deadline := deadline(t); ; {
		conn, err := net.Dial("unix", path)
		if err == nil {
			t.Cleanup(func() { _ = conn.Close() })
			hello := make([]byte, len(wire.Frame(wire.TypeHello, wire.EncodeHello(wire.Version))))
			_, err := io.ReadFull(conn, hello)
			require.NoError(t, err)
			return conn.(*net.UnixConn)
		}
		require.NoError(t, deadline.Err())
		runtime.Gosched()
	}
}

// TestInvalidMessages are answered with a failure and end the slot.
func TestInvalidMessages(t *testing.T) {
	payload, err := wire.EncodeClaim(newClaim(t, 0, "sh"))
	require.NoError(t, err)
	for _, c := range []struct {
		name    string
		message []byte
	}{
		{"go instead of a claim", wire.Frame(wire.TypeGo, nil)},
		{"a frame that is too large", wire.AppendHeader(nil, wire.TypeClaim, wire.MaxMessage+1)},
		{"a claim without a root", wire.Frame(wire.TypeClaim, payload)},
		{"a claim of a later version", wire.Frame(wire.TypeClaim, append(payload, 0xff, 0xff, 0, 0, 0, 0))},
		{"an empty claim", wire.Frame(wire.TypeClaim, nil)},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := start(t)
			conn := s.raw(t)
			_, err := conn.Write(c.message)
			require.NoError(t, err)
			answer, err := io.ReadAll(conn)
			if err != nil {
				require.ErrorIs(t, err, syscall.ECONNRESET) // the slot read less than was sent
			}
			require.NotEmpty(t, answer)
			require.Equal(t, byte(wire.TypeFailure), answer[0])
			require.Equal(t, exitFailed, s.wait(t).ExitStatus())
		})
	}
}

// TestAnotherUserIsRefused connects as a user other than root. The slot can be claimed afterwards.
func TestAnotherUserIsRefused(t *testing.T) {
	s := start(t)
	path := filepath.Join(s.fsb, claim.SocketName)
	require.Eventually(t, func() bool { return os.Chmod(path, 0o777) == nil }, testkit.Timeout, testkit.Tick)
	require.NoError(t, os.Chmod(s.fsb, 0o777))
	refused := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), 1000, ^uintptr(0)); errno != 0 {
			refused <- errno
			return
		}
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
		}
		if err == nil {
			n, rerr := unix.Read(fd, make([]byte, 1))
			if err = rerr; n > 0 {
				err = io.ErrUnexpectedEOF
			}
		}
		_ = unix.Close(fd)
		refused <- err
	}()
	require.NoError(t, <-refused)
	require.Equal(t, "it ran\n", s.become(t, image(t, nil), newClaim(t, 0, "sh", "-c", "echo it ran")))
}
