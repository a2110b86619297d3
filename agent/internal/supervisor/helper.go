package supervisor

import (
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/supervisor/spawn"
)

// maxHelpers bounds the users for whom there are helpers at a time.
const maxHelpers = 8

// helperPath is how this process, and one that it forks, names a descriptor.
const helperPath = "/proc/self/fd/"

// helper is a process that serves calls about files and ports, as one user. It ends by itself when it has nothing to do.
type helper struct {
	pid    int
	socket int
}

// open passes the connection on to the helper of a user, which it starts if there is none. The helper answers.
func (c *conn) open(user string) {
	u, home, failure := c.s.user(user)
	if failure != nil {
		c.fail(failure)
		return
	}
	if home == "" {
		home = homeIn(c.s.config.Claim.Env)
	}
	key := keyOf(u)
	for range 2 { // one that is there may just have ended
		h := c.s.helpers[key]
		if h == nil {
			if h, failure = c.s.startHelper(u, home); failure != nil {
				c.fail(failure)
				return
			}
			c.s.helpers[key] = h
		}
		err := unix.Sendmsg(h.socket, []byte{1}, unix.UnixRights(c.watch.fd), nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		if err == nil {
			c.close()
			return
		}
		if err == unix.EAGAIN {
			c.fail(&wire.Failure{Stage: wire.StageLimit, Errno: unix.EAGAIN, Detail: "calls"})
			return
		}
		c.s.dropHelper(key)
	}
	c.fail(&wire.Failure{Stage: wire.StageProcess, Errno: unix.EPIPE, Detail: "(the helper ends at once)"})
}

func (s *Supervisor) startHelper(u spawn.User, home string) (*helper, *wire.Failure) {
	if len(s.helpers) >= maxHelpers {
		return nil, &wire.Failure{Stage: wire.StageLimit, Errno: unix.EAGAIN, Detail: "users at a time"}
	}
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, spawn.Failed(wire.StageStdio, err, "")
	}
	defer func() { _ = unix.Close(ends[1]) }()
	null, err := spawn.OpenNull()
	if err != nil {
		_ = unix.Close(ends[0])
		return nil, spawn.Failed(wire.StageStdio, err, "/dev/null")
	}
	defer func() { _ = unix.Close(null) }()
	pid, failure := spawn.Start(&spawn.Process{
		Args: []string{helperPath + strconv.Itoa(s.config.Helper)}, Env: []string{"HOME=" + home, "GOMAXPROCS=2", "GODEBUG=disablethp=1"},
		Cwd: "/", User: u, Files: [3]int{null, null, null}, More: []int{ends[1]}, Dies: s.config.Joined,
	})
	if failure != nil {
		_ = unix.Close(ends[0])
		return nil, failure
	}
	s.config.Reaper.Started()
	return &helper{pid, ends[0]}, nil
}

func (s *Supervisor) dropHelper(key string) {
	if h := s.helpers[key]; h != nil {
		_ = unix.Close(h.socket)
		delete(s.helpers, key)
	}
}

// helperEnded forgets the helper with a pid.
func (s *Supervisor) helperEnded(pid int) {
	for key, h := range s.helpers {
		if h.pid == pid {
			s.dropHelper(key)
		}
	}
}

func keyOf(u spawn.User) string {
	key := strconv.FormatUint(uint64(u.UID), 10) + ":" + strconv.FormatUint(uint64(u.GID), 10)
	for _, g := range u.Groups {
		key += ":" + strconv.FormatUint(uint64(g), 10)
	}
	return key
}

func homeIn(env []string) string {
	home := "/"
	for _, e := range env {
		if len(e) > 5 && e[:5] == "HOME=" {
			home = e[5:]
		}
	}
	return home
}
