package cmd

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func newJanitorSweep(c *cli, j *janitors) *cobra.Command {
	f, in := &verdictFilter{}, &janitorv1.SweepRequest{}
	cmd := &cobra.Command{
		Use:   "sweep [CONTAINER...]",
		Short: "Start a sweep of the nodes at once",
		Long: `Have the janitors scan their nodes, check every verdict against the API server, and delete what has the verdict Delete:
everything, or only what belongs to the CONTAINERs. A container with another verdict is kept even if it is named.
--dry-run deletes nothing and shows what would be deleted.

A janitor repeats deletions that fail by itself; the exit code is then 1.`,
		Example: `  fsb-ctl janitor sweep --dry-run
  fsb-ctl janitor sweep --node worker-3
  fsb-ctl janitor sweep 5f0c9a52-7f0e-4a76-9a54-0d1c7b0d7d1c-1
  fsb-ctl janitor sweep --reason leftover,agent-pod-gone -o json`,
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			for _, id := range args {
				if !slices.Contains(in.GetContainerIds(), id) {
					in.ContainerIds = append(in.ContainerIds, id)
				}
			}
			if _, in.Reasons, err = f.parse(); err != nil {
				return err
			}
			return sweepNodes(cmd.Context(), c, *j, in)
		},
	}
	cmd.Flags().BoolVar(&in.DryRun, "dry-run", false, "delete nothing and show what would be deleted")
	f.addReasons(cmd, "only deletions for one of these `reasons`, as verdicts shows them")
	return cmd
}

// sweeper prints the results of a sweep as they arrive.
type sweeper struct {
	c       *cli
	table   *render.Table
	results []*janitorv1.SweepResponse
	failed  int
	// missing are the results of containers that no janitor has found yet, by name.
	missing map[string]*janitorv1.SweepResponse
	known   map[string]bool
}

// sweepNodes runs the sweeps of the janitors one after the other.
func sweepNodes(ctx context.Context, c *cli, j janitors, in *janitorv1.SweepRequest) error {
	s := &sweeper{c: c, table: render.Sweeps(), missing: map[string]*janitorv1.SweepResponse{}, known: map[string]bool{}}
	err := eachJanitor(ctx, c, j, func(ctx context.Context, c *cli, client janitorv1.JanitorServiceClient) error {
		return s.at(ctx, c, client, in)
	})
	if outcome := s.finish(in, j.node != ""); err == nil {
		return outcome
	}
	return err
}

// at runs the sweep of one janitor.
func (s *sweeper) at(ctx context.Context, c *cli, client janitorv1.JanitorServiceClient, in *janitorv1.SweepRequest) error {
	doing := "sweep by " + c.peer
	o, err := openStream(ctx, c, doing, func(ctx context.Context) (grpc.ServerStreamingClient[janitorv1.SweepResponse], error) {
		return client.Sweep(ctx, in)
	})
	defer c.progress.stop()
	for m := o.first; err == nil; m, err = o.stream.Recv() {
		if err := s.take(m); err != nil {
			return err
		}
		c.progress.start(doing)
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return c.classify(err)
}

// take records a result, and prints it if results are printed one by one.
func (s *sweeper) take(m *janitorv1.SweepResponse) error {
	id := m.GetVerdict().GetContainerId()
	if m.GetOutcome() == janitorv1.SweepResponse_OUTCOME_NOT_FOUND {
		s.missing[id] = m // the container may be on another node
		return nil
	}
	s.known[id] = true
	return s.print(m)
}

func (s *sweeper) print(m *janitorv1.SweepResponse) error {
	s.results = append(s.results, m)
	if m.GetOutcome() == janitorv1.SweepResponse_OUTCOME_FAILED {
		s.failed++
	}
	s.c.progress.pause()
	switch s.c.settings.Output {
	case "json", "yaml":
		return nil // printed together at the end
	case "name":
		switch m.GetOutcome() {
		case janitorv1.SweepResponse_OUTCOME_DELETED, janitorv1.SweepResponse_OUTCOME_WOULD_DELETE:
			return s.c.printNames("container", m.GetVerdict().GetContainerId())
		}
		return nil
	}
	s.table.Add(render.SweepRow(m)...)
	return s.table.Flush(s.c.Out)
}

// finish prints the results that are known only at the end, and returns the error of the sweep.
func (s *sweeper) finish(in *janitorv1.SweepRequest, oneNode bool) error {
	var nowhere []string
	for _, id := range in.GetContainerIds() {
		m, missing := s.missing[id]
		if !missing || s.known[id] {
			continue
		}
		nowhere = append(nowhere, id)
		if !oneNode {
			m.Verdict.NodeName = "" // it is on no node
		}
		if err := s.print(m); err != nil {
			return err
		}
	}
	if _, err := printList(s.c, "results", s.results); err != nil {
		return err
	}
	if len(s.results) == 0 && !s.c.machine() {
		s.c.infof("nothing to delete")
	}
	switch {
	case s.failed > 0:
		return fault.New(errdefs.ErrUnknown, reasonSweepFailed, "%d of %d could not be deleted", s.failed, len(s.results))
	case len(nowhere) > 0:
		return fault.New(errdefs.ErrNotFound, reasonNoContainer, "no node has %s", strings.Join(nowhere, ", "))
	}
	return nil
}
