package main

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/load"
)

// childVariable makes the test's binary the program.
const childVariable = "HOSTILE_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) != "" {
		main()
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Env = append(os.Environ(), childVariable+"=1")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestAttacksStayInTheirContainer: on a machine none is made.
func TestAttacksStayInTheirContainer(t *testing.T) {
	for _, args := range [][]string{{"run"}, {"run", "first"}, {"attack", "mount: bind"}} {
		out, err := run(t, args...)
		require.Error(t, err, "%v: %s", args, out)
		require.Contains(t, out, "in a container of their own")
	}
}

func TestHarmlessArguments(t *testing.T) {
	out, err := run(t, attack.PrivilegesArg)
	require.NoError(t, err)
	require.Regexp(t, `^[0-9]+ [0-9a-f]+\n$`, out)
	_, err = run(t, attack.ChildArg)
	require.NoError(t, err)
	out, err = run(t, load.Sleep, "0")
	require.NoError(t, err)
	require.Contains(t, out, load.KindDone)
	out, err = run(t, attack.ReadArg, "/nowhere")
	require.NoError(t, err)
	require.Contains(t, out, "no canary")
	_, err = run(t, "nothing")
	require.Error(t, err)
}
