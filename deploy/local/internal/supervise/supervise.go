// Package supervise keeps a set of programs running: it starts them in dependency order, starts again whichever ends,
// bounds their log files, writes their pid files, and stops them in reverse order.
//
//	waiting --dependencies ready--> running --it ends--> backoff --delay--> running
//	   any state --Run's context ends--> stopping --SIGTERM, grace, SIGKILL--> stopped
//
// The programs write to their log files directly, not through a pipe of the supervisor's, so that they outlive it when
// it is killed: the next supervisor's owner (`fsb-local up`) finds them by their pid files.
package supervise

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
)

const (
	// probeEvery is how often a starting program is asked whether it is ready.
	probeEvery = 50 * time.Millisecond
	// A program that ran for steady before it ended starts again at once; otherwise the delay doubles.
	steady   = 5 * time.Second
	minDelay = 50 * time.Millisecond
	maxDelay = 3 * time.Second
	// maxLog is the size at which a log file is put aside; one older file is kept.
	maxLog      = 16 << 20
	rotateEvery = 5 * time.Second
)

// Program is one supervised program.
type Program struct {
	Name string
	// Path is the executable; Args its arguments, the name it is called by first.
	Path string
	Args []string
	Env  []string
	// After names the programs that must have been ready once before this one is started.
	After []string
	// Ready returns nil once the program works. It is called only until the first success.
	Ready func(context.Context) error
	// Grace is how long the program may take to end after SIGTERM.
	Grace time.Duration
	// PIDFile and LogFile are where its record and its output are kept.
	PIDFile, LogFile string
}

// Supervisor runs programs. Make one with New and use it once.
type Supervisor struct {
	programs []Program
	logger   *slog.Logger
	ready    map[string]chan struct{}
}

// New makes a supervisor of the programs, which are given in the order in which they are to be started.
func New(programs []Program, logger *slog.Logger) (*Supervisor, error) {
	s := &Supervisor{programs: programs, logger: logger, ready: make(map[string]chan struct{})}
	var problems []error
	for _, program := range programs {
		for _, name := range program.After {
			if s.ready[name] == nil {
				problems = append(problems, fmt.Errorf("%s is to start after %s, which is not before it", program.Name, name))
			}
		}
		s.ready[program.Name] = make(chan struct{})
	}
	return s, errors.Join(problems...)
}

// Run runs the programs until ctx ends, and returns when the last of them has exited.
func (s *Supervisor) Run(ctx context.Context) {
	type running struct {
		stop context.CancelFunc
		done chan struct{}
	}
	var all []running
	var rotating sync.WaitGroup
	for _, program := range s.programs {
		// Not a child of ctx: the programs end one after the other, not all at once.
		own, stop := context.WithCancel(context.WithoutCancel(ctx))
		one := running{stop: stop, done: make(chan struct{})}
		all = append(all, one)
		go func() {
			defer close(one.done)
			s.keep(own, program)
		}()
		rotating.Go(func() { s.rotate(ctx, program.LogFile) })
	}
	<-ctx.Done()
	for i := len(all) - 1; i >= 0; i-- {
		all[i].stop()
		<-all[i].done
		s.logger.Info("stopped", "program", s.programs[i].Name)
	}
	rotating.Wait()
}

// keep runs one program, again and again, until ctx ends.
func (s *Supervisor) keep(ctx context.Context, program Program) {
	for _, name := range program.After {
		select {
		case <-s.ready[name]:
		case <-ctx.Done():
			return
		}
	}
	probing, stopProbing := context.WithCancel(ctx)
	var probe sync.WaitGroup
	defer probe.Wait()
	defer stopProbing()
	probe.Go(func() { s.watchReady(probing, program) })

	delay, lastExit := minDelay, ""
	for restarts := 0; ; restarts++ {
		began := time.Now()
		err := s.once(ctx, program, host.Record{Started: began, Restarts: restarts, LastExit: lastExit})
		if ctx.Err() != nil {
			return
		}
		lastExit = "ended without an error"
		if err != nil {
			lastExit = err.Error()
		}
		if time.Since(began) >= steady {
			delay = minDelay
		}
		s.logger.Warn("program ended, starting it again", "program", program.Name, "exit", lastExit,
			"after", time.Since(began).String(), "delay", delay.String())
		select {
		case <-ctx.Done():
			return
		case <-time.After(delay):
		}
		delay = min(2*delay, maxDelay)
	}
}

func (s *Supervisor) watchReady(ctx context.Context, program Program) {
	if host.Poll(ctx, probeEvery, program.Ready) == nil {
		s.logger.Info("ready", "program", program.Name)
		close(s.ready[program.Name])
	}
}

// once runs the program to its end, or stops it when ctx ends.
func (s *Supervisor) once(ctx context.Context, program Program, record host.Record) error {
	cmd, err := start(program)
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(program.PIDFile) }()
	if record.Process, err = host.Lookup(cmd.Process.Pid); err == nil {
		err = host.WriteRecord(program.PIDFile, record)
	}
	if err != nil {
		s.logger.Error("keeping the pid file", "program", program.Name, "error", err)
	}
	s.logger.Info("started", "program", program.Name, "pid", cmd.Process.Pid, "restarts", record.Restarts)

	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-ended:
		return err
	case <-time.After(program.Grace):
	}
	s.logger.Warn("program did not end in time, killing it", "program", program.Name)
	_ = cmd.Process.Kill()
	return <-ended
}

func start(program Program) (*exec.Cmd, error) {
	if err := os.MkdirAll(filepath.Dir(program.LogFile), 0o750); err != nil {
		return nil, fmt.Errorf("making the log directory: %w", err)
	}
	log, err := os.OpenFile(program.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the log: %w", err)
	}
	defer func() { _ = log.Close() }()
	cmd := &exec.Cmd{
		Path: program.Path, Args: program.Args, Env: program.Env, Dir: "/", Stdout: log, Stderr: log,
		// A session of its own: a Ctrl-C at the terminal that called `up` must not reach it.
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", program.Name, err)
	}
	return cmd, nil
}
