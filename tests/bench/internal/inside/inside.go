// Package inside measures what users do in sandboxes, through the gateway as they do it: commands, the first output of a new sandbox, terminals
// and files, beside an exec of containerd's own client with runc and a plain gRPC stream of bytes.
package inside

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	runv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/run/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/density"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/raw"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

// Names of the series.
const (
	// RawCreate and RawExec are containerd's own client with runc: a container, and a process in one.
	RawCreate, RawExec = "raw_create", "raw_exec"
	// Run is RunProcess through the gateway, RunAgent at the agent.
	Run, RunAgent = "run", "run_agent"
	// FirstOutput is StartSandbox until the process has written.
	FirstOutput = "first_output"
	// Echo is a character's way through a terminal and back.
	Echo = "terminal_echo"
)

const (
	pool      = "bench-inside"
	capacity  = 16
	warmups   = 3
	cleanTime = 4 * time.Minute
)

// Options say how much is measured.
type Options struct {
	// Rounds is the number of samples of each series.
	Rounds int
	// Parallel is how many RunProcess run at once, for Duration.
	Parallel int
	Duration time.Duration
	// FileBytes is the size of the file that is written and read.
	FileBytes int
	// Terminals is how many terminals are idle, for Idle.
	Terminals int
	Idle      time.Duration
	Say       func(format string, args ...any)
}

// suite is one run.
type suite struct {
	Options
	*mesh.Mesh
	report *report.Report
	raw    *raw.Runner

	// gateway is the connection that all series share; sandbox is where they run.
	gateway   *grpc.ClientConn
	processes processv1.ProcessServiceClient
	files     filesystemv1.FilesystemServiceClient
	runs      runv1.RunServiceClient
	sandbox   *sandboxv1.Sandbox
}

// Measure measures and fills the report. When it returns, it has removed everything that it created in the cluster except the empty namespace.
func Measure(ctx context.Context, o Options, r *report.Report) (err error) {
	m, err := mesh.Connect(ctx, mesh.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if v, err := m.Node.Version(ctx); err == nil {
		r.Environment.Containerd = v.Version
	}
	logs, err := os.MkdirTemp("", "fsb-bench-")
	if err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(logs)) }()
	defer func() { // also when the run was interrupted
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
		defer cancel()
		err = errors.Join(err, m.Remove(clean, pool))
	}()
	s := &suite{Options: o, Mesh: m, report: r}
	if err := s.prepare(ctx, logs); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.raw.Sweep(context.WithoutCancel(ctx))) }()
	for _, part := range []struct {
		name    string
		measure func(context.Context) error
	}{
		{"commands", s.commands}, {"commands at the agent", s.atAgent}, {"commands at once", s.throughput}, {"first outputs", s.firstOutputs},
		{"terminals", s.echoes}, {"files", s.transfers}, {"idle terminals", s.idle}, {"memory", s.memory},
	} {
		o.Say("measuring %s", part.name)
		if err := part.measure(ctx); err != nil {
			return fmt.Errorf("measuring %s: %w", part.name, err)
		}
	}
	s.conditions()
	Sum(r)
	r.Judge(budget.Inside())
	return nil
}

// prepare makes the pool, the sandbox, and the model of the raw containers.
func (s *suite) prepare(ctx context.Context, logs string) error {
	var err error
	if s.gateway, err = s.Gateway(ctx); err != nil {
		return err
	}
	s.processes, s.files = processv1.NewProcessServiceClient(s.gateway), filesystemv1.NewFilesystemServiceClient(s.gateway)
	s.runs = runv1.NewRunServiceClient(s.gateway)
	slots, err := s.Open(ctx, mesh.Pool{Name: pool, Places: capacity})
	if err != nil {
		return err
	}
	if slots.Wanted == 0 {
		return fmt.Errorf("pool %s keeps no slots: %s", pool, slots.Off)
	}
	resp, err := s.Sandboxes.CreateSandbox(ctx, mesh.Request(pool, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG))
	if err != nil {
		return fmt.Errorf("creating the sandbox: %w", err)
	}
	s.sandbox = resp.GetSandbox()
	if s.raw, err = raw.Like(ctx, s.Node, s.sandbox.GetStatus().GetSandboxId(), logs); err != nil {
		return err
	}
	return s.raw.Sweep(ctx)
}

// memory weighs the sandboxes of the pool: their main process, a sleep, and their supervisor, with their share of the shim.
func (s *suite) memory(ctx context.Context) error {
	agent, err := s.AgentUID(ctx, pool)
	if err != nil {
		return err
	}
	uids := map[string]bool{}
	for range capacity / 2 {
		resp, err := s.Sandboxes.CreateSandbox(ctx, mesh.Request(pool, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST))
		if err != nil {
			return err
		}
		if resp.GetStartPath() == sandboxv1.StartPath_START_PATH_SLOT {
			uids[resp.GetSandbox().GetUid()] = true
		}
	}
	mib, err := density.Weigh(ctx, s.Node, agent, uids)
	if err != nil {
		return err
	}
	s.report.Value("claimed_mib", mib, "MiB", "PSS of a claimed sandbox with its supervisor and its share of the shim, mean")
	return nil
}

func (s *suite) conditions() {
	r := s.report
	r.Fact("handler", s.Handler)
	r.Fact("way", "through the gateway's Service, mutual TLS, one kept connection")
	r.Fact("samples", fmt.Sprintf("%d of each series, after %d that are not counted", s.Rounds, warmups))
	r.Fact("concurrency", fmt.Sprintf("one call at a time; %d for %s where the rate is measured", s.Parallel, s.Duration))
	r.Fact("sandbox", fmt.Sprintf("%v of %s, processes are its %s", mesh.Command(), mesh.Image, "true, echo and cat"))
	r.Fact("reference", "containerd's Go client with the runc shim, which starts no process of its own as ctr does")
}
