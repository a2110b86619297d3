package daemon_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/leader"
)

// asDaemon, as its first argument, makes the test binary a daemon; the next one is the file in which that records its runs. The
// subcommand probe makes it one, too.
const asDaemon = "--runs"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == asDaemon || os.Args[1] == "probe") {
		s := &settings{}
		daemon.Main(daemon.Program{Name: "test", Config: s, Run: func(context.Context) error { return recordRun(s) }})
	}
	goleak.VerifyTestMain(m)
}

type settings struct {
	daemon.Common

	runs, problem string
}

func (s *settings) AddFlags(fs *pflag.FlagSet) {
	s.Common.AddFlags(fs)
	fs.StringVar(&s.runs, "runs", "", "the file")
	fs.StringVar(&s.problem, "problem", "", "the end of the first run")
}

func (*settings) Validate() error { return nil }

// recordRun appends the process's id to the file, and fails the first time.
func recordRun(s *settings) error {
	before, err := os.ReadFile(s.runs)
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	if err := os.WriteFile(s.runs, fmt.Appendln(before, os.Getpid(), strings.Join(os.Args[1:], " ")), 0o600); err != nil {
		return err
	}
	switch {
	case len(before) > 0:
		return nil
	case s.problem == "lost":
		return fmt.Errorf("running election: %w: other", leader.ErrLeadershipLost)
	}
	return fmt.Errorf("something else: %s", s.problem)
}

// TestStartsAgain: a daemon that lost leadership runs again in the same process, with the same arguments. Another error ends it.
func TestStartsAgain(t *testing.T) {
	for problem, want := range map[string]struct{ runs, code int }{"lost": {2, 0}, "other": {1, 1}} {
		t.Run(problem, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "runs")
			self, err := os.Executable()
			require.NoError(t, err)
			cmd := exec.CommandContext(t.Context(), self, asDaemon, path, "--problem", problem)
			output, _ := cmd.CombinedOutput()
			require.Equal(t, want.code, cmd.ProcessState.ExitCode(), "%s", output)
			raw, err := os.ReadFile(path)
			require.NoError(t, err)
			runs := strings.Split(strings.TrimSpace(string(raw)), "\n")
			require.Len(t, runs, want.runs, "%s", output)
			for _, run := range runs {
				require.Equal(t, fmt.Sprintf("%d %s %s --problem %s", cmd.Process.Pid, asDaemon, path, problem), run)
			}
		})
	}
}
