// Package process runs the real binaries that a suite measures, each with its output in a file. All methods may be called
// concurrently; the caller that starts a process must Kill or Stop it.
package process

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/host"
)

// tailLines is how much of a process's output Tail returns.
const tailLines = 10

// Config is what to start.
type Config struct {
	// Name is what the process is called in messages, and its log in Dir.
	Name, Dir string
	// Path and Args are its command line; Env is all of its environment.
	Path string
	Args []string
	Env  []string
}

// Process is one that was started.
type Process struct {
	name, log string
	began     time.Time
	cmd       *exec.Cmd
	ended     chan struct{} // closed when it has ended
	kill      func()
}

// Start starts a process.
func Start(c Config) (*Process, error) {
	p := &Process{name: c.Name, log: filepath.Join(c.Dir, c.Name+".log"), ended: make(chan struct{})}
	out, err := os.Create(p.log)
	if err != nil {
		return nil, fmt.Errorf("making a log of %s: %w", c.Name, err)
	}
	defer func() { _ = out.Close() }()      // the process has its own
	p.cmd = exec.Command(c.Path, c.Args...) //nolint:noctx // Kill or Stop ends it and waits for it
	p.cmd.Stdout, p.cmd.Stderr, p.cmd.Env = out, out, c.Env
	p.began = time.Now()
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", c.Name, err)
	}
	go func() {
		defer close(p.ended)
		_ = p.cmd.Wait() // how it ended is in its ProcessState
	}()
	p.kill = sync.OnceFunc(func() {
		_ = p.cmd.Process.Kill()
		<-p.ended
	})
	return p, nil
}

// PID is its number.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Began is when it was started.
func (p *Process) Began() time.Time { return p.began }

// Alive is an error, with the end of its output, if it has ended.
func (p *Process) Alive() error {
	select {
	case <-p.ended:
		return fmt.Errorf("%s has ended by itself (%s)\n%s", p.name, p.cmd.ProcessState, p.Tail())
	default:
		return nil
	}
}

// Usage is what it has used.
func (p *Process) Usage() (host.Process, error) {
	if err := p.Alive(); err != nil {
		return host.Process{}, err
	}
	return host.ReadProcess(p.PID())
}

// Kill kills it and waits for its end.
func (p *Process) Kill() { p.kill() }

// Stop asks it to end. One that has not ended in time is killed, which is an error.
func (p *Process) Stop(limit time.Duration) error {
	defer p.kill()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("asking %s to end: %w", p.name, err)
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-p.ended:
		return nil
	case <-timer.C:
		return fmt.Errorf("%s has not ended within %s\n%s", p.name, limit, p.Tail())
	}
}

// Tail is the end of its output.
func (p *Process) Tail() string {
	raw, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	return strings.Join(lines[max(0, len(lines)-tailLines):], "\n")
}

// FreeAddress returns an address of an IP address with a port that is free now.
func FreeAddress(ip string) (string, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
	if err != nil {
		return "", fmt.Errorf("finding a free port: %w", err)
	}
	address := l.Addr().String()
	if err := l.Close(); err != nil {
		return "", fmt.Errorf("finding a free port: %w", err)
	}
	return address, nil
}
