package transfer

import (
	"errors"
	"fmt"
	"path"
	"regexp"
	"strings"
	"unicode/utf8"
)

// Location is where a copy comes from or goes to: a standard stream, a path on this machine, or a path in a sandbox.
type Location struct {
	// Stream is standard input or output. Sandbox is empty for a path on this machine.
	Stream  bool
	Sandbox string
	Path    string
}

var sandboxName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// Parse returns the location that an argument names: "-", NAME:PATH, or a local path. A colon after a slash belongs to a local path, and an empty
// PATH is the home directory of the user.
func Parse(argument string) (Location, error) {
	switch argument {
	case "":
		return Location{}, errors.New("a path is empty")
	case "-":
		return Location{Stream: true}, nil
	}
	name, rest, remote := strings.Cut(argument, ":")
	if !remote || strings.Contains(name, "/") {
		return Location{Path: argument}, nil
	}
	switch {
	case !sandboxName.MatchString(name):
		return Location{}, fmt.Errorf("invalid sandbox name %q in %q; for a local file with a colon in its name, write ./%s", name, argument, argument)
	case !utf8.ValidString(rest):
		return Location{}, fmt.Errorf("the path %q is not valid UTF-8; copy the directory that contains it", rest)
	case strings.IndexByte(rest, 0) >= 0:
		return Location{}, fmt.Errorf("the path %q contains a zero byte", rest)
	case len(rest) > maxPath:
		return Location{}, fmt.Errorf("a path of %d bytes is longer than %d", len(rest), maxPath)
	case rest == "":
		rest = "."
	}
	return Location{Sandbox: name, Path: rest}, nil
}

// maxPath is the longest path that the API accepts.
const maxPath = 4095

// String returns the location as Parse accepts it.
func (l Location) String() string {
	switch {
	case l.Stream:
		return "-"
	case l.Sandbox != "":
		return l.Sandbox + ":" + l.Path
	default:
		return l.Path
	}
}

// lastName returns the name that a copy of the path gets in a directory; empty if the path ends with ".", ".." or "~" or is the root: then what is in
// the directory is copied, and not the directory.
func lastName(p string) string {
	last := path.Base(strings.TrimRight(p, "/"))
	if strings.Trim(p, "/") == "" || last == "." || last == ".." || p == "~" || p == "~/" {
		return ""
	}
	return last
}
