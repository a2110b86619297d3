// Package passwd finds a user in the files of an image or a sandbox, /etc/passwd and /etc/group, as the OCI image specification defines it. It is
// pure computation, and is linked into sandbox-init, so it imports next to nothing.
package passwd

import (
	"errors"
	"math"
	"strconv"
	"strings"
)

const (
	// MaxFile is the largest file, in bytes, that its callers read.
	MaxFile = 1 << 20
	// maxGroups and maxHome bound what is kept of a user: the groups, and the length of the home directory.
	maxGroups = 1024
	maxHome   = 4096
)

// ErrNoUser means that the files have no such user or group.
var ErrNoUser = errors.New("no such user or group")

// InvalidError is an entry that no user can have.
type InvalidError struct{ Path, Problem string }

// Error implements error.
func (e *InvalidError) Error() string { return e.Path + " " + e.Problem }

// User is a user in numbers.
type User struct {
	UID, GID uint32
	// Groups are all groups, the primary one first.
	Groups []uint32
	// Home is the home directory; empty if the files have none.
	Home string
}

// Find parses a user: user, uid, user:group, uid:gid, uid:group, user:gid. An empty name is root. passwd and group are the contents of the files.
// The error is ErrNoUser or an InvalidError.
func Find(spec, passwd, group string) (User, error) {
	name, groupName, hasGroup := strings.Cut(spec, ":")
	if name == "" {
		name = "0"
	}
	var found User
	entry := lookup(passwd, name, 2)
	uid, numeric := parseID(name)
	switch {
	case len(entry) >= 4:
		id, ok := parseID(entry[2])
		gid, gok := parseID(entry[3])
		if !ok || !gok {
			return User{}, ErrNoUser
		}
		found.UID, found.GID = id, gid
		if len(entry) >= 6 {
			found.Home = strings.Clone(entry[5]) // not the whole file
		}
	case numeric:
		found.UID = uid
	default:
		return User{}, ErrNoUser
	}
	if len(found.Home) > maxHome || strings.IndexByte(found.Home, 0) >= 0 {
		return User{}, &InvalidError{"/etc/passwd", "has an invalid home directory for the user"}
	}
	if hasGroup {
		gid, ok := parseID(groupName)
		if e := lookup(group, groupName, 2); len(e) >= 3 {
			gid, ok = parseID(e[2])
		}
		if !ok {
			return User{}, ErrNoUser
		}
		found.GID = gid
	}
	found.Groups = []uint32{found.GID}
	if entry == nil {
		return found, nil
	}
	var err error
	found.Groups, err = groupsOf(entry[0], group, found.GID)
	return found, err
}

// Numeric reports whether the files are not needed to know a user's ids: uid:gid.
func Numeric(spec string) bool {
	uid, gid, both := strings.Cut(spec, ":")
	_, one := parseID(uid)
	_, other := parseID(gid)
	return both && one && other
}

// groupsOf returns the numbers of a user's groups, its primary one first.
func groupsOf(user, group string, primary uint32) ([]uint32, error) {
	gids := []uint32{primary}
	for line := range strings.Lines(group) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) < 4 {
			continue
		}
		gid, ok := parseID(f[2])
		if !ok || gid == primary {
			continue
		}
		for member := range strings.SplitSeq(f[3], ",") {
			if member == user {
				gids = append(gids, gid)
			}
		}
		if len(gids) > maxGroups {
			return nil, &InvalidError{"/etc/group", "has more than " + strconv.Itoa(maxGroups) + " groups for the user"}
		}
	}
	return gids, nil
}

// lookup returns the line of a colon-separated file whose name, or number in the column, is key. A name takes precedence.
func lookup(file, key string, column int) []string {
	number, numeric := parseID(key)
	var byNumber []string
	for line := range strings.Lines(file) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if f[0] == key && key != "" && len(f) > column {
			return f
		}
		if !numeric || byNumber != nil || len(f) <= column {
			continue
		}
		if n, ok := parseID(f[column]); ok && n == number {
			byNumber = f
		}
	}
	return byNumber
}

// parseID accepts what OCI runtimes accept.
func parseID(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n > math.MaxInt32 {
		return 0, false
	}
	return uint32(n), true
}
