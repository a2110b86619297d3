package passwd_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/passwd"
)

const (
	users  = "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1001::/home/app:/bin/sh\n5:x:77:78::/n:/bin/sh\nbroken\nnegative:x:-1:0::/:/\n"
	groups = "root:x:0:root\napp:x:1001:\nextra:x:2000:other,app\nmore:x:2001:app\n"
)

func TestFind(t *testing.T) {
	for _, c := range []struct {
		spec     string
		uid, gid uint32
		groups   []uint32
		home     string
		fails    bool
	}{
		{spec: "", groups: []uint32{0}, home: "/root"},
		{spec: "root", groups: []uint32{0}, home: "/root"},
		{spec: "app", uid: 1000, gid: 1001, groups: []uint32{1001, 2000, 2001}, home: "/home/app"},
		{spec: "1000", uid: 1000, gid: 1001, groups: []uint32{1001, 2000, 2001}, home: "/home/app"},
		{spec: "01000", uid: 1000, gid: 1001, groups: []uint32{1001, 2000, 2001}, home: "/home/app"},
		{spec: "4242", uid: 4242, groups: []uint32{0}},
		{spec: "4242:55", uid: 4242, gid: 55, groups: []uint32{55}},
		{spec: "4242:extra", uid: 4242, gid: 2000, groups: []uint32{2000}},
		{spec: "app:extra", uid: 1000, gid: 2000, groups: []uint32{2000, 2001}, home: "/home/app"},
		{spec: "app:7", uid: 1000, gid: 7, groups: []uint32{7, 2000, 2001}, home: "/home/app"},
		{spec: "5", uid: 77, gid: 78, groups: []uint32{78}, home: "/n"},
		{spec: "unknown", fails: true},
		{spec: "app:unknown", fails: true},
		{spec: "negative", fails: true},
		{spec: "broken", fails: true},
		{spec: "4294967295", fails: true},
		{spec: "app:x:y", fails: true},
	} {
		user, err := passwd.Find(c.spec, users, groups)
		if c.fails {
			require.Error(t, err, c.spec)
			continue
		}
		require.NoError(t, err, c.spec)
		require.Equal(t, c.uid, user.UID, c.spec)
		require.Equal(t, c.gid, user.GID, c.spec)
		require.Equal(t, c.groups, user.Groups, c.spec)
		require.Equal(t, c.home, user.Home, c.spec)
	}
	user, err := passwd.Find("", "", "")
	require.NoError(t, err)
	require.Zero(t, user.UID)
}

// TestUserIsBounded has user files whose size is allowed and whose content is not.
func TestUserIsBounded(t *testing.T) {
	var many strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&many, "g:x:%d:app\n", i)
	}
	for name, c := range map[string]struct{ passwd, group, path string }{
		"groups":                   {users, many.String(), "/etc/group"},
		"one group, many times":    {users, "g:x:9:" + strings.Repeat("app,", 2000) + "\n", "/etc/group"},
		"home":                     {"app:x:1:1::" + strings.Repeat("/h", 4000) + ":", groups, "/etc/passwd"},
		"home that is no C string": {"app:x:1:1::/h\x00e:", groups, "/etc/passwd"},
	} {
		_, err := passwd.Find("app", c.passwd, c.group)
		var file *passwd.InvalidError
		require.ErrorAs(t, err, &file, name)
		require.Equal(t, c.path, file.Path, name)
	}
}
