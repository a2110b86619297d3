package main

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// command holds the candidate paths of the claim's command.
type command struct {
	name  string
	paths []string
}

// resolve lists the candidates, as Go's exec.LookPath does for the OCI runtimes: a name with a slash is a path, any other is
// looked up in the absolute directories of PATH.
func resolve(c *wire.Claim) command {
	name := c.Args[0]
	for i := range len(name) {
		if name[i] == '/' {
			return command{name: name, paths: []string{name}}
		}
	}
	search := ""
	for _, e := range c.Env {
		if len(e) >= 5 && e[:5] == "PATH=" {
			search = e[5:]
		}
	}
	found := command{name: name}
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

// find returns the first candidate that is a file that may be executed. It allocates little and opens nothing: the limits
// are already in force.
func (c command) find() (string, *wire.Failure) {
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
			return "", failed(wire.StageLookup, err, path)
		}
		return path, nil
	}
	return "", failed(wire.StageLookup, missing, c.name)
}
