package supervisor

import (
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/passwd"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/supervisor/spawn"
)

// maxListed is how many bytes of a command line are kept to list it.
const maxListed = 4 << 10

// start starts a process.
func (s *Supervisor) start(r *wire.Start) (*process, *wire.Failure) {
	if len(s.processes)-len(s.ended) >= maxProcesses {
		return nil, &wire.Failure{Stage: wire.StageLimit, Errno: unix.EAGAIN, Detail: "processes"}
	}
	if r.Tag != "" {
		if p := s.find(wire.Target{Tag: r.Tag}); p != nil && p.exit == nil {
			return nil, &wire.Failure{Stage: wire.StageProcess, Errno: unix.EEXIST}
		}
	}
	claim := s.config.Claim
	user, home, failure := s.user(r.User)
	if failure != nil {
		return nil, failure
	}
	start := &spawn.Process{Args: r.Args, Env: environment(r, claim.Env, home), Cwd: r.Cwd, User: user, Dies: s.config.Joined}
	if start.Cwd == "" {
		start.Cwd = claim.Cwd
	}
	if r.User == "" {
		start.Ambient = claim.Capabilities.Ambient
	}
	p := &process{s: s, uid: user.UID, tag: r.Tag, args: listed(r.Args), terminal: r.Terminal != nil}
	p.ring.limit = wire.DefaultBuffer
	if r.Buffer != 0 {
		p.ring.limit = int(r.Buffer)
	}
	if failure := s.launch(p, start, r); failure != nil {
		p.release()
		return nil, failure
	}
	if r.Timeout != 0 {
		p.deadline = monotonic() + int64(min(r.Timeout, 1<<40))*1e6
		s.timers++
	}
	s.processes[p.pid] = p
	s.config.Reaper.Started()
	return p, nil
}

// launch makes the streams of a process, and starts it. After a failure they are the process's to release.
func (s *Supervisor) launch(p *process, start *spawn.Process, r *wire.Start) *wire.Failure {
	var theirs []int
	defer func() {
		for _, fd := range theirs {
			_ = unix.Close(fd)
		}
	}()
	if r.Terminal != nil {
		master, slave, failure := spawn.OpenTerminal(r.Terminal)
		if failure != nil {
			return failure
		}
		theirs = append(theirs, slave)
		_ = unix.Fchown(slave, int(start.User.UID), -1) // so that the user can open it by its name
		start.Files, start.Terminal = [3]int{slave, slave, slave}, true
		if err := p.output(master, wire.Console); err != nil {
			return spawn.Failed(wire.StageStdio, err, "")
		}
		p.input = &inlet{p: p, watch: p.outputs[0].watch, terminal: true}
	} else if failure := p.pipes(start, r.Input, &theirs); failure != nil {
		return failure
	}
	p.started = now()
	pid, failure := spawn.Start(start)
	p.pid = uint32(pid)
	return failure
}

// pipes makes the standard streams of a process without a terminal.
func (p *process) pipes(start *spawn.Process, input bool, theirs *[]int) *wire.Failure {
	fail := func(err error) *wire.Failure { return spawn.Failed(wire.StageStdio, err, "") }
	var err error
	if input {
		var ends [2]int
		if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
			return fail(err)
		}
		*theirs = append(*theirs, ends[0])
		start.Files[0] = ends[0]
		p.input = &inlet{p: p}
		if p.input.watch, err = p.s.poll.take(ends[1], 0, p.input); err != nil {
			return fail(err)
		}
	} else {
		if start.Files[0], err = spawn.OpenNull(); err != nil {
			return fail(err)
		}
		*theirs = append(*theirs, start.Files[0])
	}
	for i, stream := range []wire.Stream{wire.Stdout, wire.Stderr} {
		var ends [2]int
		if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
			return fail(err)
		}
		*theirs = append(*theirs, ends[1])
		start.Files[1+i] = ends[1]
		if err := p.output(ends[0], stream); err != nil {
			return fail(err)
		}
		// So that it can be opened by its name.
		_ = unix.Fchown(ends[1], int(start.User.UID), int(start.User.GID))
	}
	return nil
}

// output reads a stream of the process from a descriptor.
func (p *process) output(fd int, stream wire.Stream) error {
	o := &outlet{p: p, stream: stream}
	w, err := p.s.poll.take(fd, unix.EPOLLIN, o)
	if err != nil {
		return err
	}
	o.watch = w
	p.outputs = append(p.outputs, o)
	return nil
}

// user finds a user in the files of the sandbox. An empty name is the sandbox's own, whose home its environment has.
func (s *Supervisor) user(name string) (user spawn.User, home string, failure *wire.Failure) {
	c := s.config.Claim
	if name == "" {
		return spawn.User{UID: c.UID, GID: c.GID, Groups: c.Groups}, "", nil
	}
	var users, groups string
	if !passwd.Numeric(name) {
		var err error
		if users, err = readFile("/etc/passwd"); err == nil {
			groups, err = readFile("/etc/group")
		}
		if err != nil {
			return user, "", spawn.Failed(wire.StageUser, err, "/etc/passwd and /etc/group")
		}
	}
	found, err := passwd.Find(name, users, groups)
	if err != nil {
		f := &wire.Failure{Stage: wire.StageUser, Errno: unix.ENOENT, Detail: name}
		if err != passwd.ErrNoUser { //nolint:errorlint // it is returned as it is
			f.Errno, f.Detail = unix.EINVAL, err.Error()
		}
		return user, "", f
	}
	if found.Home == "" {
		found.Home = "/"
	}
	return spawn.User{UID: found.UID, GID: found.GID, Groups: found.Groups}, found.Home, nil
}

// readFile reads a regular file of the sandbox, of which it expects no good. One that does not exist is empty.
func readFile(path string) (string, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_MAGICLINKS})
	if err == unix.ENOENT {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return "", err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > passwd.MaxFile {
		return "", unix.EFBIG
	}
	b := make([]byte, st.Size)
	have := 0
	for have < len(b) {
		n, err := unix.Read(fd, b[have:])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return "", err
		}
		if n == 0 {
			break
		}
		have += n
	}
	return string(b[:have]), nil
}

// environment returns the variables of a process: those of the sandbox with those of the request, of each name the last one. home is that of
// another user than the sandbox's.
func environment(r *wire.Start, own []string, home string) []string {
	var env []string
	set := func(v string) {
		name, _, _ := strings.Cut(v, "=")
		for i, e := range env {
			if len(e) > len(name) && e[len(name)] == '=' && e[:len(name)] == name {
				env[i] = v
				return
			}
		}
		env = append(env, v)
	}
	if !r.OnlyEnv {
		env = append(make([]string, 0, len(own)+len(r.Env)+1), own...)
		if home != "" {
			set("HOME=" + home)
		}
	}
	for _, e := range r.Env {
		set(e)
	}
	return env
}

// listed returns as much of a command line as is kept.
func listed(args []string) []string {
	left := maxListed
	var list []string
	for _, a := range args {
		if len(a) > left {
			return append(list, strings.Clone(a[:left]))
		}
		list = append(list, strings.Clone(a))
		left -= len(a)
	}
	return list
}
