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
	// removeGrace is the grace period of `run --rm`: the process has ended, or the user pressed Ctrl-C.
	removeGrace = 2 * time.Second
	// deleteConcurrency is how many sandboxes are deleted at the same time.
	deleteConcurrency = 8
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
		Long: `Delete sandboxes. The process gets SIGTERM and, after the grace period, SIGKILL. Then the record is deleted.
--grace overrides the grace period of the sandbox, longer or shorter, also for a deletion that has begun.

The command waits until the sandboxes are deleted. With --wait=false, it waits only until the deletion is durable.`,
		Example: `  fsb-ctl delete web
  fsb-ctl delete web py --grace 0s

  # give the process a minute to end
  fsb-ctl delete web --grace 60s

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
	cmd.Flags().BoolVar(&o.wait, "wait", true, "wait until the sandboxes are deleted")
	cmd.Flags().BoolVar(&o.ignore, "ignore-not-found", false, "ignore sandboxes that do not exist")
	cmd.Flags().DurationVar(&o.grace, "grace", 0, "`duration` between SIGTERM and SIGKILL (default: that of each sandbox)")
	return cmd
}

func deleteSandboxes(ctx context.Context, c *cli, o *deleteOptions, args []string) error {
	selects := o.selector != "" || o.pool != ""
	switch {
	case len(args) > 0 && (o.everything || selects):
		return usagef("NAMEs and --all, --selector or --pool are mutually exclusive")
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

// deleteMany deletes several sandboxes at the same time. It reports every error but the first, which it returns when all
// deletions have ended.
func deleteMany(ctx context.Context, c *cli, client sandboxv1.SandboxServiceClient, o *deleteOptions, targets []*sandboxv1.Sandbox) error {
	results := make([]error, len(targets))
	out := &lockedWriter{w: c.Out}
	var g errgroup.Group
	g.SetLimit(deleteConcurrency)
	for i, s := range targets {
		g.Go(func() error {
			quiet := *c
			quiet.progress, quiet.Out = &progress{w: c.Err, clock: c.Clock}, out // the progress line shows one call only
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
	// A listed sandbox that no longer exists, or that was replaced, is deleted: that is success.
	listed := s.GetUid() != "" && (isNotFound(err, fault.SandboxNotFound) || fault.ReasonOf(err) == fault.FenceMismatch)
	if listed || o.ignore && isNotFound(err, fault.SandboxNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if !o.wait {
		return printDeleted(c, s, "deletion accepted")
	}
	deleting := &sandboxv1.Sandbox{Namespace: s.GetNamespace(), Name: s.GetName(), Uid: out.GetSandbox().GetUid()}
	err = watchUntil(ctx, c, client, deleting, "waiting for "+s.GetName()+" to end", func(now *sandboxv1.Sandbox) bool { return now == nil })
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("waiting for sandbox %q to end: %w", s.GetName(), err)
	}
	if err != nil {
		return err
	}
	return printDeleted(c, s, "deleted")
}

func printDeleted(c *cli, s *sandboxv1.Sandbox, what string) error {
	c.progress.pause()
	if c.settings.Output == "name" {
		return c.printNames("sandbox", s.GetName())
	}
	_, err := fmt.Fprintf(c.Out, "sandbox %q %s\n", s.GetName(), what)
	return err
}

// lockedWriter serializes the writes of several goroutines.
type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

// Write implements io.Writer.
func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}
