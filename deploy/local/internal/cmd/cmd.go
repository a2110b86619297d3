// Package cmd is fsb-local's own command line: it turns flags into options, and errors into an exit code.
package cmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/grpclog"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/cluster"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
)

// errUnhealthy ends `status` with code 1 and no error message: the table has the details.
var errUnhealthy = errors.New("unhealthy")

// Execute runs fsb-local's own commands and returns the exit code.
func Execute(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	// grpc's own log reports every attempt to reach a containerd that is starting; our errors report what matters.
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, io.Discard))
	root := newRoot()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err != nil && !errors.Is(err, errUnhealthy) {
		fmt.Fprintln(os.Stderr, "fsb-local: "+err.Error())
	}
	if err != nil {
		return 1
	}
	return 0
}

func newRoot() *cobra.Command {
	var c components.Config
	root := &cobra.Command{
		Use:   "fsb-local",
		Short: "A real single-node Kubernetes on this machine, for Fast Sandbox",
		Long: `fsb-local runs a real Kubernetes (etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet,
kube-proxy) with a containerd of its own on this machine, in a network namespace of its own, and installs Fast Sandbox
into it. It needs root, and nothing but the distribution's packages.

Called as etcd, kube-apiserver, kubectl and so on, by a link or as the first argument, it is that program.`,
		Example:           "  sudo fsb-local up --manifests deploy/overlays/local\n  eval \"$(fsb-local env)\"\n  fsb-local kubectl get pods -A",
		SilenceErrors:     true,
		SilenceUsage:      true,
		PersistentPreRunE: func(*cobra.Command, []string) error { return complete(&c) },
	}
	flags := root.PersistentFlags()
	flags.StringVar(&c.BinDir, "bin-dir", binDir(), "directory of fsb-local, containerd/ and Fast Sandbox's own programs")
	flags.StringVar(&c.DataDir, "data-dir", "/var/lib/fsb-local", "directory for the cluster's state")
	flags.StringVar(&c.RunDir, "run-dir", "/run/fsb-local", "directory for sockets and pid files")
	root.AddCommand(newUp(&c), newDown(&c), newStatus(&c), newEnv(&c), newLoadImage(&c), newDigests(&c), newLogs(&c), newRestart(&c), newSupervise())
	return root
}

// complete makes the directories absolute, and adds the trace store if the cluster has one.
func complete(c *components.Config) error {
	for _, dir := range []*string{&c.BinDir, &c.DataDir, &c.RunDir} {
		absolute, err := filepath.Abs(*dir)
		if err != nil {
			return fmt.Errorf("making %q absolute: %w", *dir, err)
		}
		*dir = absolute
	}
	c.Traces = cluster.HasTraces(*c)
	return nil
}

// binDir is the directory that fsb-local itself is in.
func binDir() string {
	self, err := os.Executable()
	if err != nil {
		return "bin"
	}
	if real, err := filepath.EvalSymlinks(self); err == nil {
		self = real
	}
	return filepath.Dir(self)
}
