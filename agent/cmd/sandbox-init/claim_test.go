//go:build integration

package main_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
)

// become claims the slot and waits for its process.
func (c *container) become(t testing.TB, lower string, what *claim.Claim) string {
	t.Helper()
	conn := c.connect(t)
	require.NoError(t, conn.Send(deadline(t), what, mount(t, lower)))
	require.NoError(t, conn.Go(deadline(t)))
	status := c.wait(t)
	require.True(t, status.Exited() && status.ExitStatus() == 0, "it ended with %#x: %s", status, c.text(t))
	return c.text(t)
}

// TestConfinementEqualsCold compares what a process sees in a claimed slot with what it sees in a container that runc started.
func TestConfinementEqualsCold(t *testing.T) {
	for _, user := range []struct {
		name string
		uid  uint32
	}{{"root", 0}, {"a user", 1000}} {
		t.Run(user.name, func(t *testing.T) {
			for _, view := range []struct{ name, script string }{
				{"the probe", ""},
				// The probe cannot compare this: the Go runtime raises its own limit.
				{"limits", "ulimit -a; umask; id; busybox 2>&1 | head -1; cat /etc/hostname; hostname"},
			} {
				t.Run(view.name, func(t *testing.T) {
					lower := image(t, nil)
					process := newProcess(user.uid, "sh", "-c", view.script)
					if view.name == "the probe" {
						process.Args = []string{"probe", "one", "two three"}
					}
					process.Cwd, process.Rlimits = "/srv/made", []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 500, Hard: 1000}}
					s := start(t)
					have := s.become(t, lower, claimOf(t, process))
					k := cold(t, lower, process, filepath.Join(s.fsb, "hostname"))
					require.Zero(t, k.wait(t).ExitStatus(), k.text(t))
					if view.name != "the probe" {
						require.Equal(t, k.text(t), have)
						return
					}
					var slot, want map[string]any
					require.NoError(t, json.Unmarshal([]byte(have), &slot), have)
					require.NoError(t, json.Unmarshal([]byte(k.text(t)), &want), k.text(t))
					require.Equal(t, want, slot)
				})
			}
		})
	}
}

// TestClaimLeavesNoTrace searches for the channel from outside, and for the slot's root, mounts and variables from inside.
// The probe compares the file descriptors.
func TestClaimLeavesNoTrace(t *testing.T) {
	s := start(t)
	said := s.become(t, image(t, nil), newClaim(t, 0, "sh", "-c",
		`ls / | tr '\n' ' '; echo; cat /proc/mounts; cat /proc/1/environ | tr '\0' ' '`))
	lines := strings.Split(said, "\n")
	require.Equal(t, "bin data dev etc home proc sys tmp ", lines[0])
	require.NotContains(t, said, "sandbox-init")
	require.NotContains(t, said, "GOGC")
	require.NotContains(t, said, "/new")
	require.NotContains(t, said, "/fsb ")
	_, err := os.Lstat(filepath.Join(s.fsb, claim.SocketName))
	require.ErrorIs(t, err, os.ErrNotExist)
}
