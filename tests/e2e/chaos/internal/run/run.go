// Package run is one run of the fault harness: it creates a pool, runs load and faults at the same time, waits until the mesh
// has settled, audits it, deletes everything, audits that too, and restores the cluster. It never deletes what a component of
// the mesh must delete. Run must be called once in a process.
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
	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/load"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/plan"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/strike"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/truth"
)

const (
	namespace = "default"
	system    = "fast-sandbox-system"
	janitors  = "fast-sandbox-janitor"
	image     = "docker.io/fast-sandbox/busybox:demo"
	// connections is the number of clients. The last one uses REST through the gateway, the others gRPC.
	connections = 4
	// users is how many sandboxes are used for commands and files meanwhile.
	users = 3
	// answerTime is how long calls may continue after the load has ended.
	answerTime = 4 * time.Minute
)

// Options configure a run.
type Options struct {
	Plan plan.Options
	// Settle is how long the mesh may take to settle after the last fault, and again after everything was deleted. It is longer
	// than a tombstone stays whose sandbox may still be written (70 s), with a grace period before.
	Settle time.Duration
	// Disable is a component that is switched off during the run, to prove that the audit finds what it then fails to do:
	// "janitor", or empty.
	Disable string
	// Out receives the progress of the run, and the history of each violation.
	Out io.Writer
	// LogFile, if set, receives the clients' log and the faults as JSON, one per line.
	LogFile string
}

// Defaults returns the options of CI: two minutes, with the load that two cores can take.
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
	inside   inside.Config
	clock    clock.RealClock
	dir      string
	strikes  []audit.Strike
	garbage  *garbage
	orphans  map[string]bool
	begin    time.Time
}

// Run runs everything. An error means that the run failed; violations are only in the report.
func Run(ctx context.Context, o Options) (report *Report, err error) {
	if o.Disable != "" && o.Disable != janitor {
		return nil, fmt.Errorf("cannot disable %q: only %q", o.Disable, janitor)
	}
	h := &harness{Options: o, orphans: map[string]bool{}}
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
	if o.Disable == janitor {
		h.progress("the janitor is switched off: this run must fail")
		if err := h.cluster.enableJanitor(ctx, false); err != nil {
			return nil, errors.Join(err, h.cluster.sweep(context.WithoutCancel(ctx)))
		}
	}
	report, err = h.execute(ctx)
	return report, errors.Join(err, h.cluster.sweep(context.WithoutCancel(ctx)))
}

// prepare creates the pool and the parts of the harness.
func (h *harness) prepare(ctx context.Context, prefix string) error {
	real := h.clock
	h.striker = &strike.Striker{Kube: h.cluster.kube, Clock: real, Namespace: namespace, Pool: pool, System: system, Janitors: janitors}
	if err := h.cluster.sweep(ctx); err != nil { // what a killed harness has left
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
	conn, err := h.cluster.dial()
	if err != nil {
		return err
	}
	h.observer = &truth.Observer{
		Allocator: allocatorv1.NewAllocatorServiceClient(conn),
		Kube:      h.cluster.kube, Node: h.cluster.node, Clock: real, Namespace: namespace, Pool: pool, Prefix: prefix, System: system,
		Snapshotter: snapshotter, Dirs: map[string]string{"log": logRoot, "bundle": bundleRoot}, Label: load.Label,
	}
	if err := h.observer.Begin(ctx, h.dir); err != nil {
		return err
	}
	h.runner = &load.Runner{Log: &load.Log{}, Clock: real, Namespace: namespace, Pool: pool, Image: image, Prefix: prefix}
	for range connections - 1 {
		conn, err := h.cluster.dial()
		if err != nil {
			return err
		}
		h.runner.Clients = append(h.runner.Clients, sandboxv1.NewSandboxServiceClient(conn))
	}
	rest, err := h.cluster.rest()
	if err != nil {
		return err
	}
	h.runner.Clients = append(h.runner.Clients, rest)
	h.inside = inside.Config{
		Sandboxes: sandboxv1.NewSandboxServiceClient(conn), Processes: processv1.NewProcessServiceClient(conn), Files: filesystemv1.NewFilesystemServiceClient(conn),
		Clock: real, Namespace: namespace, Pool: pool, Image: image, Prefix: "used-" + prefix, Users: users, Lines: 100, Every: 100 * time.Millisecond, FileBytes: 256 << 10,
	}
	h.progress("pool %s is ready; names begin with %s", pool, prefix)
	return nil
}

// execute is the run itself.
func (h *harness) execute(ctx context.Context) (*Report, error) {
	p := plan.New(h.Plan)
	h.progress("%d sandboxes and %d faults in %s, seed %d", len(p.All()), len(p.Faults), h.Plan.Duration, h.Plan.Seed)
	h.garbage = newGarbage(h.cluster.kube, h.observer.Prefix, p.Faults)
	if err := h.garbage.create(ctx); err != nil {
		return nil, err
	}
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
	using, stopUsing := context.WithTimeout(ctx, h.Plan.Duration)
	defer stopUsing()
	used := make(chan inside.Result, 1)
	go func() { used <- inside.Run(using, h.inside) }()
	h.strikes = h.striker.Run(ctx, p.Faults, func(s audit.Strike) {
		h.progress("fault %s %s %s", s.Kind, s.Target, s.Failed)
		if s.Kind == string(plan.KillGC) {
			h.garbage.release(ctx)
		}
	})
	<-loaded
	result := <-used
	h.garbage.wait()
	h.progress("faults and load have ended; settling")
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := h.cluster.awaitReady(ctx); err != nil {
		return nil, err
	}
	report := h.newReport()
	report.Inside = result
	first, obs, took, err := h.settle(ctx)
	if err != nil {
		return nil, err
	}
	report.SettleSeconds = took.Seconds()
	report.add(first)
	report.audited(obs)

	h.progress("deleting the remaining sandboxes")
	deleting, cancelDelete := context.WithTimeout(ctx, answerTime)
	defer cancelDelete()
	h.runner.DeleteAll(deleting, p.All())
	last, _, took, err := h.settle(ctx)
	if err != nil {
		return nil, err
	}
	report.EmptySeconds = took.Seconds()
	report.OrphansDeleted, report.GarbageDeleted = len(h.orphans)-report.OrphansLeft, h.garbage.deleted()
	report.add(last)
	h.count(report)
	return report, h.writeLog()
}

// settle audits until there are no violations or the time is over; the last verdict counts. What the janitor and the garbage
// collector must delete is a violation until they have.
func (h *harness) settle(ctx context.Context) (audit.Verdict, audit.Observations, time.Duration, error) {
	begin := h.clock.Now()
	lastProgress := begin
	for {
		obs, err := h.observer.Observe(ctx)
		over := h.clock.Since(begin) > h.Settle
		calls := h.runner.Log.Calls()
		verdict := audit.Audit(calls, h.strikes, obs)
		for _, id := range verdict.Orphans {
			h.orphans[id] = true
		}
		switch {
		case err != nil && over:
			return verdict, obs, 0, fmt.Errorf("observing: %w", err)
		case err == nil && (over || len(verdict.Violations) == 0):
			if len(verdict.Violations) > 0 {
				fmt.Fprintln(h.Out, audit.Explain(verdict, calls, h.strikes, obs))
			}
			return verdict, obs, h.clock.Since(begin), nil
		}
		if err == nil && h.clock.Since(lastProgress) > 15*time.Second {
			lastProgress = h.clock.Now()
			x := verdict.Violations[0]
			h.progress("%d violations so far, such as %s of %s: %s", len(verdict.Violations), x.Kind, x.Subject, x.What)
		}
		if err := wait(ctx, 2*time.Second); err != nil {
			return verdict, obs, 0, err
		}
	}
}

func (h *harness) progress(format string, args ...any) {
	fmt.Fprintf(h.Out, "%7.1fs "+format+"\n", append([]any{h.clock.Since(h.begin).Seconds()}, args...)...)
}

// dial connects to the public API as any client does.
func (c *cluster) dial() (*grpc.ClientConn, error) {
	conn, err := rpc.Dial(c.addr, rpc.ClientConfig{TLS: c.tls, Silence: rpc.DefaultSilence})
	if err != nil {
		return nil, err
	}
	c.conns = append(c.conns, conn)
	return conn, nil
}
