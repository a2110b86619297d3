// Package janitor measures what scans of a node cost the real janitor, on a real containerd with running containers, all of
// them healthy, and a real API server with their Sandboxes and their agents' Pods. Run must be called once at a time.
package janitor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/errdefs/pkg/errgrpc"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/host"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/wait"
)

// Options set the amount of measurements.
type Options struct {
	// Bin is where the built binaries are.
	Bin string
	// Containers is their number on the node. Fewer is a smaller number that is measured first, to show how costs grow; 0 for none.
	Containers, Fewer int
	// Scans are measured at each number, and Interval lies between them.
	Scans    int
	Interval time.Duration
	Say      func(format string, args ...any)
}

const (
	// idleTicks is the number of intervals for which a janitor that does not scan is measured.
	idleTicks = 10
	// settleTime is how long a janitor that has just started is not measured.
	settleTime = 3 * time.Second
	// listPause lies between two calls of the baseline.
	listPause = 50 * time.Millisecond
)

// policy of the audit log: of the janitor all, of others nothing.
const policy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    users: [` + userName + `]
  - level: None
`

// testbed is a node with a cluster.
type testbed struct {
	Options
	bin        string
	workspace  *workspace
	api        *apiserver.Server
	node       *node
	audit      string // file
	kubeconfig string // of the janitor
	agents     []*agentv1.AgentInfo
	keepers    int
}

// Run measures and fills the report. When it returns, everything that it started has ended, and everything that a killed run left.
func Run(ctx context.Context, o Options, r *report.Report) (err error) {
	if o.Containers < 1 || o.Fewer < 0 || o.Fewer >= o.Containers || o.Scans < 1 || o.Interval <= 0 {
		return fmt.Errorf("cannot measure %d scans of %d containers and, before that, of %d, one each %s", o.Scans, o.Containers, o.Fewer, o.Interval)
	}
	bin, err := filepath.Abs(o.Bin)
	if err != nil {
		return fmt.Errorf("finding the binaries: %w", err)
	}
	if os.Geteuid() != 0 {
		return errors.New("containerd needs root")
	}
	w := &testbed{Options: o, bin: bin, workspace: fixedWorkspace()}
	if err := w.workspace.acquire(); err != nil {
		return err
	}
	defer func() {
		o.Say("removing everything")
		err = errors.Join(err, w.workspace.release())
	}()
	defer func() { err = errors.Join(err, w.stop()) }()
	if err := w.start(ctx); err != nil {
		return err
	}
	m, err := w.measure(ctx)
	if err != nil {
		return err
	}
	if err := w.countRequests(m); err != nil {
		return err
	}
	if version, err := w.node.client.Version(ctx); err == nil {
		r.Environment.Containerd = version.Version
	}
	w.conditions(r, m)
	Sum(r, m)
	r.Judge(budget.Janitor())
	return nil
}

// start starts an API server and a containerd.
func (w *testbed) start(ctx context.Context) (err error) {
	w.Say("starting an API server and a containerd")
	dir := filepath.Join(w.workspace.dir, "kube")
	w.audit = filepath.Join(dir, "audit.log")
	rules := filepath.Join(dir, "audit.yaml")
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(rules, []byte(policy), 0o600)); err != nil {
		return fmt.Errorf("writing the audit policy: %w", err)
	}
	w.api, err = apiserver.Start(apiserver.Options{
		Bin: w.bin, Dir: dir, Roles: []rpc.Role{rpc.RoleJanitor, rpc.RoleMetrics},
		Flags: map[string]string{"audit-policy-file": rules, "audit-log-path": w.audit},
	})
	if err != nil {
		return err
	}
	if w.kubeconfig, err = w.api.User(userName); err != nil {
		return err
	}
	w.node, err = startNode(ctx, w.bin, w.workspace)
	return err
}

// stop stops the API server gracefully; clearing the workspace ends everything else.
func (w *testbed) stop() error {
	if w.node != nil {
		_ = w.node.client.Close() // nothing is under way
	}
	if w.api == nil {
		return nil
	}
	return w.api.Stop()
}

// measure measures at each number of containers.
func (w *testbed) measure(ctx context.Context) (*Measured, error) {
	m := &Measured{}
	from := 0
	for _, n := range []int{w.Fewer, w.Containers} {
		if n == 0 {
			continue
		}
		began := time.Now()
		if err := w.fill(ctx, from, n); err != nil {
			return nil, err
		}
		w.Say("%d containers run after %.0f s more", n, time.Since(began).Seconds())
		from = n
		size, err := w.size(ctx, n)
		if err != nil {
			return nil, err
		}
		m.Sizes = append(m.Sizes, size)
	}
	return m, nil
}

// size measures with n containers, all of which run before and after it.
func (w *testbed) size(ctx context.Context, n int) (*Size, error) {
	if err := w.node.check(ctx, n); err != nil {
		return nil, err
	}
	s := &Size{Containers: n}
	var err error
	if s.Idle, err = w.idle(ctx); err != nil {
		return nil, fmt.Errorf("measuring a janitor that does not scan: %w", err)
	}
	if s.Busy, err = w.busy(ctx, n); err != nil {
		return nil, fmt.Errorf("measuring scans: %w", err)
	}
	if s.Lists, err = w.calls(ctx, w.list); err != nil {
		return nil, fmt.Errorf("measuring lists of containers: %w", err)
	}
	if s.Tasks, err = w.calls(ctx, w.listTasks); err != nil {
		return nil, fmt.Errorf("measuring lists of tasks: %w", err)
	}
	one := s.PerScan()
	w.Say("%d containers: %d scans, %.1f ms of the janitor's CPU each", n, s.Busy.Count, one.Janitor)
	return s, w.node.check(ctx, n)
}

// idle measures a janitor that scanned at its start and does not scan again.
func (w *testbed) idle(ctx context.Context) (*Window, error) {
	k, err := w.keep(never)
	if err != nil {
		return nil, err
	}
	defer k.Kill()
	// The first scan is at once, and another one as soon as containerd's events are followed.
	if err := mesh.Poll(ctx, 100*time.Millisecond, readyTime, func(ctx context.Context) error {
		now, err := k.read(ctx)
		if err == nil && now[scanCount] < 2 {
			err = fmt.Errorf("the janitor has scanned %.0f times", now[scanCount])
		}
		return err
	}); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, k.Tail())
	}
	if err := wait.For(ctx, settleTime); err != nil {
		return nil, err
	}
	win, err := w.watch(ctx, k, 0, idleTicks)
	if err != nil {
		return nil, err
	}
	if win.Count != 0 {
		return nil, fmt.Errorf("it has scanned %d times", win.Count)
	}
	return win, k.Stop(stopTime)
}

// busy measures a janitor that scans.
func (w *testbed) busy(ctx context.Context, n int) (*Window, error) {
	k, err := w.keep(w.Interval)
	if err != nil {
		return nil, err
	}
	defer k.Kill()
	judged := func(ctx context.Context) error {
		now, err := k.read(ctx)
		if err != nil {
			return err
		}
		return now.judged(n)
	}
	if err := mesh.Poll(ctx, 100*time.Millisecond, readyTime, judged); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, k.Tail())
	}
	for range warmups {
		if _, err := w.awaitScan(ctx, k); err != nil {
			return nil, err
		}
	}
	win, err := w.watch(ctx, k, w.Scans, 0)
	if err != nil {
		return nil, err
	}
	if err := judged(ctx); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, k.Tail())
	}
	return win, k.Stop(stopTime)
}

// list asks for all containers, as `ctr containers list` does, and listTasks for what runs, as `ctr tasks list` does.
func (w *testbed) list(ctx context.Context) error {
	_, err := w.node.client.ContainerService().List(ctx)
	return err
}

func (w *testbed) listTasks(ctx context.Context) error {
	_, err := w.node.client.TaskService().List(ctx, &tasks.ListTasksRequest{})
	return errgrpc.ToNative(err)
}

// calls measures a call as often as scans, by its cost to this process.
func (w *testbed) calls(ctx context.Context, call func(context.Context) error) ([]Call, error) {
	var out []Call
	for i := range warmups + w.Scans {
		if err := wait.For(ctx, listPause); err != nil {
			return nil, err
		}
		before, err := host.CPUTime(os.Getpid())
		if err != nil {
			return nil, err
		}
		began := time.Now()
		if err := call(ctx); err != nil {
			return nil, err
		}
		took := time.Since(began)
		after, err := host.CPUTime(os.Getpid())
		if err != nil {
			return nil, err
		}
		if i >= warmups {
			out = append(out, Call{At: began, Wall: millis(took), CPU: millis(after - before)})
		}
	}
	return out, nil
}

// countRequests counts the requests to the API server while scans were measured. The requests before that, by which a janitor
// learns of Pods and Sandboxes, prove that the count works.
func (w *testbed) countRequests(m *Measured) error {
	raw, err := os.ReadFile(w.audit)
	if err != nil {
		return fmt.Errorf("reading the audit log: %w", err)
	}
	all, err := parseRequests(raw)
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return errors.New("the audit log has no request of the janitor's, which cannot be")
	}
	for _, s := range m.Sizes {
		s.Busy.asked(all)
	}
	return nil
}

func (w *testbed) conditions(r *report.Report, m *Measured) {
	last := m.Sizes[len(m.Sizes)-1]
	r.Fact("samples", fmt.Sprintf("%d scans at each number of containers, one each %s, and as many lists", w.Scans, w.Interval))
	r.Fact("concurrency", 1)
	r.Fact("cache", fmt.Sprintf("warm: %d scans before do not count; nothing changes on the node or in the API server", warmups))
	r.Fact("containers_are", fmt.Sprintf("slots that were claimed: running processes in %d shims, each with a cgroup, a snapshot, a log directory, and a record with spec and request", last.Busy.Shims))
	r.Fact("agents", len(w.agents))
	r.Fact("security", "mutual TLS; a user of its own at the API server, by whose audit log requests are counted")
	r.Fact("cpu", fmt.Sprintf("by the kernel's clocks of processes, less what a janitor used in %d ticks without scans", idleTicks))
	r.Fact("beside_it", fmt.Sprintf("on the same %d cores: containerd, etcd, kube-apiserver, and a reader of metrics once in a tick", runtime.NumCPU()))
}
