package passwd_test

import (
	"errors"
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/moby/sys/user"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/passwd"
)

const (
	passwdSeed = "root:x:0:0:root:/root:/bin/sh\nbin:x:1:1::/bin:\nuser:x:1000:1001:A User,,,:/home/user:/bin/sh\n"
	groupSeed  = "root:x:0:\nwheel:x:10:user,root\nuser:x:1001:\nextra:x:20:bin,user\n"
)

// wellFormed matches files that every parser reads in the same way: no blanks, no fields that are missing, names that are no numbers.
var (
	wellFormedPasswd = regexp.MustCompile(`^([a-z_][a-z0-9_-]*:[^:\s]*:(0|[1-9][0-9]{0,8}):(0|[1-9][0-9]{0,8}):[^:\s]*:[^:\s]*:[^:\s]*\n)*$`)
	wellFormedGroup  = regexp.MustCompile(`^([a-z_][a-z0-9_-]*:[^:\s]*:(0|[1-9][0-9]{0,8}):[^:\s]*\n)*$`)
)

// FuzzUser finds a user with arbitrary files. The ids are ones that the kernel accepts, the groups are those of the
// files; where the files leave no choice, the user is the one that OCI runtimes find.
func FuzzUser(f *testing.F) {
	for _, spec := range []string{"", "user", "1000", "user:wheel", "1000:20", "user:0", "2147483648", "-1", "missing", "user:", ":wheel", "::wheel", "00", "0x10", "4294967296:1"} {
		f.Add(spec, passwdSeed, groupSeed)
	}
	f.Add("a", "a:b:c\na::5:6\r\n:::::\na:x:99999999999:0", "g:x:7:a,a\nh:x:-1:a\n\xff:")
	f.Fuzz(func(t *testing.T, spec, users, groups string) {
		got, err := passwd.Find(spec, users, groups)
		again, _ := passwd.Find(spec, users, groups)
		require.Equal(t, got, again)
		if err == nil {
			require.LessOrEqual(t, got.UID, uint32(math.MaxInt32))
			require.Equal(t, got.GID, got.Groups[0])
			for _, gid := range got.Groups {
				require.LessOrEqual(t, gid, uint32(math.MaxInt32))
			}
			require.LessOrEqual(t, len(got.Groups), min(1024, 1+strings.Count(groups, ",")+strings.Count(groups, ":")))
			require.Contains(t, users, got.Home)
			if n, err := strconv.ParseUint(spec, 10, 31); err == nil && users == "" {
				require.EqualValues(t, n, got.UID)
			}
		}
		if !wellFormedPasswd.MatchString(users) || !wellFormedGroup.MatchString(groups) || strings.ContainsAny(spec, "+-_ \t\r\n") ||
			strings.HasSuffix(spec, ":") || strings.Count(spec, ":") > 1 { // of which the other one ignores what follows the second
			return
		}
		if file := (*passwd.InvalidError)(nil); errors.As(err, &file) {
			return // it has too many groups, or a home directory that no process can be given
		}
		want, wantErr := user.GetExecUser(spec, &user.ExecUser{}, strings.NewReader(users), strings.NewReader(groups))
		require.Equal(t, wantErr == nil, err == nil, "%v, %v", wantErr, err)
		if err != nil {
			return
		}
		require.EqualValues(t, want.Uid, got.UID)
		require.EqualValues(t, want.Gid, got.GID)
		for _, gid := range want.Sgids {
			require.Contains(t, got.Groups, uint32(gid))
		}
	})
}
