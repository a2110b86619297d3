package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/network"
)

const (
	// superviseCommand is fsb-local's (hidden) command that is the supervisor.
	superviseCommand = "supervise"
	supervisorGrace  = 30 * time.Second
	strayGrace       = 3 * time.Second
)

// startSupervisor starts the supervisor, detached, inside the cluster's network namespace, and waits until it
// runs.
func startSupervisor(ctx context.Context, c components.Config) error {
	path := c.LogFile(supervisorName)
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return fmt.Errorf("making the log directory: %w", err)
	}
	log, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("opening the supervisor's log: %w", err)
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(c.Binary(), superviseCommand, "--config", c.ConfigFile())
	cmd.Dir, cmd.Stdout, cmd.Stderr = "/", log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := host.CloseOnExec(); err != nil {
		return err
	}
	if err := network.Inside(cmd.Start); err != nil {
		return fmt.Errorf("starting the supervisor: %w", err)
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	return host.Poll(ctx, 10*time.Millisecond, func(context.Context) error {
		select {
		case err := <-exited:
			return host.Permanent(fmt.Errorf("starting the supervisor: it ended (%w), see %s", err, path))
		default:
		}
		if !supervisor(c).Alive() {
			return errors.New("starting the supervisor: it does not run yet")
		}
		return nil
	})
}

// stopSupervisor has the supervisor stop every component and waits for its end. Containers keep running.
func stopSupervisor(ctx context.Context, c components.Config) error {
	if err := supervisor(c).Stop(ctx, supervisorGrace); err != nil {
		return fmt.Errorf("stopping the supervisor: %w", err)
	}
	return nil
}

// stopStrays stops the components that a killed supervisor left running, and a supervisor whose pid file is missing: that one
// first, since it would restart its components. Shims and containers are not components and stay.
func stopStrays(ctx context.Context, c components.Config, p *progress) error {
	if err := stopAll(ctx, supervisorGrace, p, func(info host.Info) bool { return isSupervisor(c, info) }); err != nil {
		return err
	}
	recorded := make(map[host.Process]bool)
	for _, component := range c.All() {
		record, err := host.ReadRecord(c.PIDFile(component.Name))
		if err != nil {
			return err
		}
		recorded[record.Process] = true
	}
	return stopAll(ctx, strayGrace, p, func(info host.Info) bool { return recorded[info.Process] || isComponent(c, info) })
}

// isSupervisor reports whether a process is a running supervisor: started by startSupervisor, and in its cgroup.
func isSupervisor(c components.Config, info host.Info) bool {
	return inSystem(info) && filepath.Base(info.Exe) == filepath.Base(c.Binary()) && len(info.Args) > 1 && info.Args[1] == superviseCommand
}

// isComponent reports whether a process is a component that a supervisor started: it executes the component's program, in the
// supervisor's cgroup.
func isComponent(c components.Config, info host.Info) bool {
	return inSystem(info) && slices.ContainsFunc(c.All(), func(component components.Component) bool {
		return filepath.Base(info.Exe) == filepath.Base(component.Path) && len(info.Args) > 0 && filepath.Base(info.Args[0]) == component.Name
	})
}

// inSystem reports whether a process is among the cluster's own, of which none is in a container.
func inSystem(info host.Info) bool { return !info.Nested && info.InCgroup(components.SystemCgroup) }

// stopAll stops, side by side, every process with a command line that matches.
func stopAll(ctx context.Context, grace time.Duration, p *progress, match func(host.Info) bool) error {
	all, err := host.Processes()
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, info := range all {
		if len(info.Args) > 0 && !info.Zombie && match(info) {
			p.say("stopping %s (pid %d), left by an earlier run", filepath.Base(info.Args[0]), info.PID)
			group.Go(func() error { return info.Stop(ctx, grace) })
		}
	}
	return group.Wait()
}
