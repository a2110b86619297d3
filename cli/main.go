// The fsb-ctl command line; installed as kubectl-fsb it is a kubectl plugin.
package main

import (
	"context"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"golang.org/x/term"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/cmd"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/config"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	env "github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the second Ctrl-C ends the process at once
	os.Exit(cmd.Main(ctx, cmd.Env{
		Name: filepath.Base(os.Args[0]), Version: daemon.Version(),
		In: os.Stdin, Out: os.Stdout, Err: os.Stderr, Terminal: term.IsTerminal(int(os.Stderr.Fd())),
		Clock: clock.RealClock{}, Getenv: env.Env, DefaultConfigFile: config.DefaultFile(), Setup: obs.Setup,
		Cluster: func(o tunnel.Options) (cmd.Cluster, error) { return tunnel.Open(o) },
	}, os.Args[1:]))
}
