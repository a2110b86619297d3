package cmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	// removeGrace is the grace of `run --rm`: its process has ended, or its owner pressed Ctrl-C.
	removeGrace = 2 * time.Second
	// deleteAtOnce is how many sandboxes are deleted side by side.
	deleteAtOnce = 8
)

type deleteOptions struct {
	selection
	everything, wait, ignore bool
	grace                    time.Duration
	graceSet                 bool
}

func newDelete(c *cli) *cobra.Command {
	o := &deleteOptions{}
	cmd := &cobra.Command{
		Use: "delete NAME... | --all | -l SELECTOR", Aliases: []string{"rm"},
		Short: "Delete sandboxes",
		Long: `Delete sandboxes: SIGTERM, the grace period, SIGKILL, and then the record. It waits until they are gone; with
--wait=false only until the deletion cannot be lost any more.`,
		Example: `  fsb-ctl delete web
  fsb-ctl delete web py --grace 0s
  fsb-ctl delete --all -n batch
  fsb-ctl delete -l team=red --wait=false`,
		ValidArgsFunction: c.completeSandboxes,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.graceSet = cmd.Flags().Changed("grace")
			return deleteSandboxes(cmd.Context(), c, o, args)
		},
	}
	o.addFlags(c, cmd, false)
	cmd.Flags().BoolVar(&o.everything, "all", false, "delete all sandboxes of the namespace")
	cmd.Flags().BoolVar(&o.wait, "wait", true, "wait until they are gone")
	cmd.Flags().BoolVar(&o.ignore, "ignore-not-found", false, "a sandbox that is not there is no error")
	cmd.Flags().DurationVar(&o.grace, "grace", 0, "`time` between SIGTERM and SIGKILL (default: each sandbox's own)")
	return cmd
}

func deleteSandboxes(ctx context.Context, c *cli, o *deleteOptions, args []string) error {
	selects := o.selector != "" || o.pool != ""
	switch {
	case len(args) > 0 && (o.everything || selects):
		return usagef("NAMEs and --all, --selector or --pool exclude each other")
	case len(args) == 0 && !o.everything && !selects:
		return usagef("NAME, --all, --selector or --pool is required")
	}
	client, err := c.sandboxes()
	if err != nil {
		return err
	}
	targets := make([]*sandboxv1.Sandbox, 0, len(args))
	for _, name := range args {
		targets = append(targets, &sandboxv1.Sandbox{Namespace: c.settings.Namespace, Name: name})
	}
	if len(args) == 0 {
		in, err := o.request(c)
		if err != nil {
			return err
		}
		if targets, err = c.listAll(ctx, in); err != nil {
			return err
		}
	}
	if len(targets) == 0 {
		c.infof("no sandboxes found in namespace %s", c.settings.Namespace)
	}
	if len(targets) == 1 {
		return deleteOne(ctx, c, client, o, targets[0])
	}
	return deleteMany(ctx, c, client, o, targets)
}

// deleteMany deletes side by side, tells of each, and returns the first error once all are done.
func deleteMany(ctx context.Context, c *cli, client sandboxv1.SandboxServiceClient, o *deleteOptions, targets []*sandboxv1.Sandbox) error {
	results := make([]error, len(targets))
	out := &lockedWriter{w: c.Out}
	var g errgroup.Group
	g.SetLimit(deleteAtOnce)
	for i, s := range targets {
		g.Go(func() error {
			quiet := *c
			quiet.progress, quiet.Out = &progress{w: c.Err, clock: c.Clock}, out // one line cannot show several
			results[i] = deleteOne(ctx, &quiet, client, o, s)
			return nil
		})
	}
	_ = g.Wait()
	var first error
	for i, err := range results {
		if err == nil {
			continue
		}
		if first == nil {
			first = err
			continue
		}
		c.infof("error: sandbox %q: %s", targets[i].GetName(), explain(err).message)
	}
	return first
}

func deleteOne(ctx context.Context, c *cli, client sandboxv1.SandboxServiceClient, o *deleteOptions, s *sandboxv1.Sandbox) error {
	in := &sandboxv1.DeleteSandboxRequest{Namespace: s.GetNamespace(), Name: s.GetName(), Uid: s.GetUid(), RequestId: uuid.NewString()}
	if o.graceSet {
		in.GracePeriod = durationpb.New(o.grace)
	}
	out, err := call(ctx, c, "deleting "+s.GetName(), func(ctx context.Context) (*sandboxv1.DeleteSandboxResponse, error) {
		return client.DeleteSandbox(ctx, in)
	})
	// One that was found by a list and is gone, or was replaced, by now is what was asked for.
	listed := s.GetUid() != "" && (isNotFound(err, fault.SandboxNotFound) || fault.ReasonOf(err) == fault.FenceMismatch)
	if listed || o.ignore && isNotFound(err, fault.SandboxNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if !o.wait {
		return deleted(c, s, "deletion accepted")
	}
	gone := &sandboxv1.Sandbox{Namespace: s.GetNamespace(), Name: s.GetName(), Uid: out.GetSandbox().GetUid()}
	err = watchUntil(ctx, c, client, gone, "waiting for "+s.GetName()+" to end", func(now *sandboxv1.Sandbox) bool { return now == nil })
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("waiting for sandbox %q to end: %w", s.GetName(), err)
	}
	if err != nil {
		return err
	}
	return deleted(c, s, "deleted")
}

func deleted(c *cli, s *sandboxv1.Sandbox, what string) error {
	c.progress.pause()
	if c.settings.Output == "name" {
		return c.printNames("sandbox", s.GetName())
	}
	_, err := fmt.Fprintf(c.Out, "sandbox %q %s\n", s.GetName(), what)
	return err
}

// lockedWriter keeps lines of several writers apart.
type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

// Write writes p whole.
func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}
