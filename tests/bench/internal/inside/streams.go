package inside

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"

	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	runv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/run/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/host"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
)

// firstOutputs has each round start a raw container, and a sandbox with a process that writes.
func (s *suite) firstOutputs(ctx context.Context) error {
	for i := range s.Rounds + warmups {
		at := time.Now()
		took, remove, err := s.raw.Run(ctx)
		if err != nil {
			return err
		}
		s.add(RawCreate, i, at, took.Total())
		if err := remove(ctx); err != nil {
			return err
		}
		if _, err := s.AwaitSlots(ctx, pool); err != nil {
			return err
		}
		at = time.Now()
		slot, output, err := s.firstOutput(ctx)
		if err != nil {
			return err
		}
		if slot {
			s.add(FirstOutput, i, at, output)
		} else {
			s.Say("a sandbox took the cold path; it does not count")
		}
	}
	return nil
}

// firstOutput creates a sandbox for an echo. It returns whether the sandbox claimed a slot, and after what time the output came.
func (s *suite) firstOutput(ctx context.Context) (slot bool, took time.Duration, err error) {
	began := time.Now()
	stream, err := s.runs.StartSandbox(ctx, &runv1.StartSandboxRequest{
		Namespace: mesh.Namespace, Sandbox: &runv1.NewSandbox{Spec: &sandboxv1.SandboxSpec{Image: mesh.Image, Pool: pool}},
		Process: &processv1.ProcessSpec{Args: []string{"echo", "hello"}},
	})
	for err == nil {
		var m *runv1.StartSandboxResponse
		if m, err = stream.Recv(); err != nil {
			break
		}
		slot = slot || m.GetCreated().GetStartPath() == sandboxv1.StartPath_START_PATH_SLOT
		if m.GetProcess().GetOutput() != nil && took == 0 {
			took = time.Since(began)
		}
	}
	if !errors.Is(err, io.EOF) {
		return slot, took, fmt.Errorf("starting a sandbox: %w", err)
	}
	if took == 0 {
		return slot, took, errors.New("starting a sandbox: there was no output")
	}
	return slot, took, nil
}

// terminal is a process with a terminal.
type terminal struct {
	events grpc.ServerStreamingClient[processv1.StartProcessResponse]
	pid    int32
	input  grpc.ClientStreamingClient[processv1.StreamInputRequest, processv1.StreamInputResponse]
}

// open starts a process with a terminal, and waits until it runs.
func (s *suite) open(ctx context.Context, args ...string) (*terminal, error) {
	events, err := s.processes.StartProcess(ctx, &processv1.StartProcessRequest{
		Namespace: mesh.Namespace, Name: s.sandbox.GetName(), Process: &processv1.ProcessSpec{Args: args},
		Terminal: &processv1.TerminalSize{Rows: 24, Columns: 80}, KillOnDisconnect: true,
	})
	if err != nil {
		return nil, fmt.Errorf("starting a terminal: %w", err)
	}
	first, err := events.Recv()
	if err != nil {
		return nil, fmt.Errorf("starting a terminal: %w", err)
	}
	t := &terminal{events: events, pid: first.GetEvent().GetStarted().GetPid()}
	if t.input, err = s.processes.StreamInput(ctx); err != nil {
		return nil, fmt.Errorf("opening the input of a terminal: %w", err)
	}
	return t, nil
}

// send sends a line; the first one names the process.
func (s *suite) send(t *terminal, data string, first bool) error {
	m := &processv1.StreamInputRequest{Data: []byte(data)}
	if first {
		m.Namespace, m.Name = mesh.Namespace, s.sandbox.GetName()
		m.Process = &processv1.ProcessSelector{By: &processv1.ProcessSelector_Pid{Pid: t.pid}}
	}
	return t.input.Send(m)
}

// echoes types characters and waits for each to come back from the terminal.
func (s *suite) echoes(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	t, err := s.open(ctx, "cat")
	if err != nil {
		return err
	}
	for i := range s.Rounds + warmups {
		at := time.Now()
		if err := s.send(t, "x", i == 0); err != nil {
			return fmt.Errorf("typing: %w", err)
		}
		for got := 0; got == 0; {
			m, err := t.events.Recv()
			if err != nil {
				return fmt.Errorf("reading the echo: %w", err)
			}
			got = len(m.GetEvent().GetOutput().GetData())
		}
		s.add(Echo, i, at, time.Since(at))
	}
	return nil
}

// idle measures an agent with terminals that are not used.
func (s *suite) idle(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for range s.Terminals {
		if _, err := s.open(ctx, "cat"); err != nil {
			return err
		}
	}
	pod, err := s.AgentCgroup(ctx, pool)
	if err != nil {
		return err
	}
	cgroups, err := host.FindCgroups()
	if err != nil {
		return err
	}
	before, err := cgroups.CPU(pod)
	if err != nil {
		return err
	}
	began := time.Now()
	select {
	case <-time.After(s.Idle):
	case <-ctx.Done():
		return ctx.Err()
	}
	after, err := cgroups.CPU(pod)
	if err != nil {
		return err
	}
	s.report.Value("idle_terminals_cores", (after-before).Seconds()/time.Since(began).Seconds(), "cores",
		fmt.Sprintf("CPU of the agent's Pod, its sandboxes included, with %d terminals that are not used", s.Terminals))
	return nil
}
