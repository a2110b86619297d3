package spawn

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// Command has the candidate paths of a command.
type Command struct {
	name  string
	paths []string
}

// Resolve lists the candidates, as Go's exec.LookPath does for the OCI runtimes: a name with a slash is a path, any other is
// looked up in the absolute directories of PATH.
func Resolve(name string, env []string) Command {
	for i := range len(name) {
		if name[i] == '/' {
			return Command{name: name, paths: []string{name}}
		}
	}
	search := ""
	for _, e := range env {
		if len(e) >= 5 && e[:5] == "PATH=" {
			search = e[5:]
		}
	}
	found := Command{name: name}
	for start := 0; start <= len(search); {
		end := start
		for end < len(search) && search[end] != ':' {
			end++
		}
		if dir := search[start:end]; dir != "" && dir[0] == '/' {
			found.paths = append(found.paths, dir+"/"+name)
		}
		start = end + 1
	}
	return found
}

// Find returns the first candidate that is a file that may be executed. It allocates little and opens nothing: the limits
// may already be in force.
func (c Command) Find() (string, *wire.Failure) {
	missing := error(unix.ENOENT)
	for _, path := range c.paths {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			if path == c.name {
				missing = err
			}
			continue
		}
		if st.Mode&unix.S_IFMT == unix.S_IFDIR || st.Mode&0o111 == 0 {
			if path == c.name {
				missing = unix.EACCES
			}
			continue
		}
		if err := unix.Faccessat2(unix.AT_FDCWD, path, unix.X_OK, unix.AT_EACCESS); err != nil && !errors.Is(err, unix.ENOSYS) {
			return "", Failed(wire.StageLookup, err, path)
		}
		return path, nil
	}
	return "", Failed(wire.StageLookup, missing, c.name)
}

// Failed returns the failure of a system call.
func Failed(stage wire.Stage, err error, detail string) *wire.Failure {
	errno, ok := err.(unix.Errno) //nolint:errorlint // system calls return it unwrapped
	if !ok {
		return &wire.Failure{Stage: stage, Detail: detail + " (" + err.Error() + ")"}
	}
	return &wire.Failure{Stage: stage, Errno: errno, Detail: detail}
}
