// Package run puts a run of the fault harness together: it makes a pool of its own, carries load and faults out side by
// side, waits until the mesh has settled, has it audited, deletes everything, has that audited too, and leaves the
// cluster as it was. Run is called once in a process.
package run

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"k8s.io/utils/clock"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/load"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/plan"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/strike"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/truth"
)

const (
	namespace   = "default"
	system      = "fast-sandbox-system"
	image       = "docker.io/fast-sandbox/busybox:demo"
	connections = 4
	// answerTime is how long calls may go on after the load has ended.
	answerTime = 4 * time.Minute
)

// Options say what a run does.
type Options struct {
	Plan plan.Options
	// Settle is how long the mesh may take to come to rest, after the last fault and again after everything was deleted.
	Settle time.Duration
	// Out gets the story of the run, and the whole history of each violation.
	Out io.Writer
	// LogFile, if set, gets the clients' log and the faults as JSON, one a line.
	LogFile string
}

// Defaults is the run of CI: two minutes, busy enough for two cores and no more.
func Defaults() Options {
	return Options{
		Plan: plan.Options{
			Seed: 1, Duration: 2 * time.Minute, Creates: 2, FaultEvery: 5 * time.Second, MinLife: time.Second, MaxLife: 20 * time.Second,
		},
		Settle: 90 * time.Second,
	}
}

// harness is one run.
type harness struct {
	Options
	cluster  *cluster
	observer *truth.Observer
	striker  *strike.Striker
	runner   *load.Runner
	clock    clock.RealClock
	dir      string
	strikes  []audit.Strike
	begin    time.Time
}

// Run carries everything out. The error is non-nil if it could not; violations are in the report alone.
func Run(ctx context.Context, o Options) (report *Report, err error) {
	h := &harness{Options: o}
	h.begin = h.clock.Now()
	if h.dir, err = os.MkdirTemp("", "fsb-chaos-"); err != nil {
		return nil, fmt.Errorf("making a directory: %w", err)
	}
	defer func() { _ = os.RemoveAll(h.dir) }()
	if h.cluster, err = connect(); err != nil {
		return nil, err
	}
	defer h.cluster.close()
	prefix := "chaos-" + uuid.NewString()[:5] + "-"
	if err := h.prepare(ctx, prefix); err != nil {
		return nil, errors.Join(err, h.cluster.sweep(context.WithoutCancel(ctx)))
	}
	report, err = h.carryOut(ctx)
	return report, errors.Join(err, h.cluster.sweep(context.WithoutCancel(ctx)))
}

// prepare makes the pool and everybody who works on it.
func (h *harness) prepare(ctx context.Context, prefix string) error {
	real := h.clock
	h.striker = &strike.Striker{Kube: h.cluster.kube, Clock: real, Namespace: namespace, Pool: pool, System: system}
	if err := h.cluster.sweep(ctx); err != nil { // what a harness that was killed has left
		return err
	}
	if err := h.cluster.makePool(ctx); err != nil {
		return err
	}
	if err := h.cluster.awaitReady(ctx); err != nil {
		return err
	}
	if err := h.striker.Begin(ctx); err != nil {
		return err
	}
	look, err := h.cluster.dial()
	if err != nil {
		return err
	}
	h.observer = &truth.Observer{
		Allocator: allocatorv1.NewAllocatorServiceClient(look),
		Kube:      h.cluster.kube, Node: h.cluster.node, Clock: real, Namespace: namespace, Pool: pool, Prefix: prefix, System: system,
		Snapshotter: snapshotter, Dirs: map[string]string{"log": logRoot, "bundle": bundleRoot}, Label: load.Label,
	}
	if err := h.observer.Begin(ctx, h.dir); err != nil {
		return err
	}
	h.runner = &load.Runner{Log: &load.Log{}, Clock: real, Namespace: namespace, Pool: pool, Image: image, Prefix: prefix}
	for range connections {
		conn, err := h.cluster.dial()
		if err != nil {
			return err
		}
		h.runner.Clients = append(h.runner.Clients, sandboxv1.NewSandboxServiceClient(conn))
	}
	h.say("pool %s is ready; names begin with %s", pool, prefix)
	return nil
}

// carryOut is the run itself.
func (h *harness) carryOut(ctx context.Context) (*Report, error) {
	p := plan.New(h.Plan)
	h.say("%d sandboxes and %d faults in %s, seed %d", len(p.All()), len(p.Faults), h.Plan.Duration, h.Plan.Seed)
	watching, stop := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		h.observer.Watch(watching)
	}()
	defer func() {
		stop()
		<-watched
	}()

	answers, cancel := context.WithTimeout(ctx, h.Plan.Duration+answerTime)
	defer cancel()
	loaded := make(chan struct{})
	go func() {
		defer close(loaded)
		h.runner.Run(answers, p.Lives)
	}()
	h.strikes = h.striker.Run(ctx, p.Faults, func(s audit.Strike) { h.say("fault %s %s %s", s.Kind, s.Target, s.Failed) })
	<-loaded
	h.say("faults and load are over; settling")
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := h.cluster.awaitReady(ctx); err != nil {
		return nil, err
	}
	report := h.newReport()
	first, obs, took, err := h.settle(ctx)
	if err != nil {
		return nil, err
	}
	report.SettleSeconds = took.Seconds()
	report.take(first)
	report.saw(obs)

	h.say("deleting what is left")
	deleting, cancelDelete := context.WithTimeout(ctx, answerTime)
	defer cancelDelete()
	h.runner.DeleteAll(deleting, p.All())
	last, _, took, err := h.settle(ctx)
	if err != nil {
		return nil, err
	}
	report.EmptySeconds = took.Seconds()
	report.take(last)
	h.count(report)
	return report, h.writeLog()
}

// settle audits until there is nothing to complain of, or the time is over; the last verdict counts.
func (h *harness) settle(ctx context.Context) (audit.Verdict, audit.Observations, time.Duration, error) {
	begin := h.clock.Now()
	told := begin
	for {
		obs, err := h.observer.Observe(ctx)
		over := h.clock.Since(begin) > h.Settle
		calls := h.runner.Log.Calls()
		verdict := audit.Audit(calls, h.strikes, obs)
		switch {
		case err != nil && over:
			return verdict, obs, 0, fmt.Errorf("observing: %w", err)
		case err == nil && (over || len(verdict.Violations) == 0):
			if len(verdict.Violations) > 0 {
				fmt.Fprintln(h.Out, audit.Explain(verdict, calls, h.strikes, obs))
			}
			return verdict, obs, h.clock.Since(begin), nil
		}
		if err == nil && h.clock.Since(told) > 15*time.Second {
			told = h.clock.Now()
			x := verdict.Violations[0]
			h.say("%d violations yet, such as %s of %s: %s", len(verdict.Violations), x.Kind, x.Subject, x.What)
		}
		if err := pause(ctx, 2*time.Second); err != nil {
			return verdict, obs, 0, err
		}
	}
}

func (h *harness) say(format string, args ...any) {
	fmt.Fprintf(h.Out, "%7.1fs "+format+"\n", append([]any{h.clock.Since(h.begin).Seconds()}, args...)...)
}

// dial connects to the public API as any client does.
func (c *cluster) dial() (*grpc.ClientConn, error) {
	conn, err := rpc.Dial(c.addr, rpc.ClientConfig{TLS: c.tls})
	if err != nil {
		return nil, err
	}
	c.conns = append(c.conns, conn)
	return conn, nil
}
