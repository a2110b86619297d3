package task

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/output"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/process"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/layout"
)

const (
	// setupTime is how long sandbox-init may take to make its container, on a machine without an idle processor.
	setupTime = 30 * time.Second
	// drainTime is how long the output of a process that has ended is waited for, while another one holds its streams.
	drainTime = 2 * time.Second
)

// container is one container of the group.
type container struct {
	id, bundle            string
	stdin, stdout, stderr string
	plan                  *plan.Plan
	init                  *process.Process
	streams               *output.Streams

	// entering is held to read while a process enters the container, and to write while none may. It is locked before mu.
	entering sync.RWMutex

	mu                     sync.Mutex
	started, paused, ended bool
	link                   link
	execs                  map[string]*execution
}

// create makes the container's cgroup, and starts sandbox-init in it. It returns when that has made the container, and waits for its claim.
// After an error nothing is left, except its cgroup if the error says so.
func (s *Service) create(ctx context.Context, c *container) (err error) {
	defer func() {
		if err != nil {
			if errors.Is(err, os.ErrProcessDone) || c.init != nil && ended(err) {
				err = fmt.Errorf("%s while it made container %s: %w: %w", plan.InitEnded, c.id, errdefs.ErrUnavailable, err)
			}
			err = errors.Join(err, s.abandon(c))
		}
	}()
	if err := s.cgroups.Create(c.plan.Cgroup, c.plan.Resources); err != nil {
		return err
	}
	if c.streams, err = output.Open(c.stdin, c.stdout, c.stderr); err != nil {
		return fmt.Errorf("opening the streams of container %s: %w", c.id, err)
	}
	local, remote, err := process.Socketpair()
	if err != nil {
		return fmt.Errorf("starting container %s: %w", c.id, err)
	}
	c.link.socket = local
	defer remote.Close()
	mounts, err := openMounts(c.plan)
	if err != nil {
		return fmt.Errorf("starting container %s: %w", c.id, err)
	}
	defer mounts.close()
	if err := s.start(ctx, c, remote, mounts); err != nil {
		return err
	}
	_ = remote.Close()
	if err := c.confine(mounts); err != nil {
		return fmt.Errorf("starting container %s: %w", c.id, err)
	}
	return setUp(ctx, local, &c.plan.Setup)
}

// ended reports whether an error is that of a process, or of its end of a socket, that has ended.
func ended(err error) bool {
	for _, e := range []error{unix.ESRCH, unix.EPIPE, unix.ECONNRESET, io.EOF, io.ErrUnexpectedEOF} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// start starts sandbox-init in the container's cgroup. It waits for its Setup.
func (s *Service) start(ctx context.Context, c *container, setup *os.File, m *mounts) error {
	if err := c.streams.Chown(int(c.plan.FirstID)); err != nil {
		return fmt.Errorf("starting container %s: %w", c.id, err)
	}
	program, err := programIn(int(m.files[0].Fd()))
	if err != nil {
		return fmt.Errorf("starting container %s: %w", c.id, err)
	}
	defer program.Close()
	entrance, err := s.cgroups.Entrance(c.plan.Cgroup)
	if err != nil {
		return fmt.Errorf("starting container %s: %w", c.id, err)
	}
	defer entrance.Close()
	c.init, err = s.starter.Start(ctx, &process.Spec{
		Path: fmt.Sprintf("/proc/self/fd/%d", program.Fd()), Args: []string{layout.InitPath}, Env: claim.Environment(),
		Files: append(append(c.streams.Files[:], setup), m.files...), Flags: flags(c.plan),
		Network: c.plan.Network, InNetwork: m.inNetwork, FirstID: c.plan.FirstID, Cgroup: entrance,
	})
	if err != nil {
		return err
	}
	c.streams.Started()
	return nil
}

// confine makes, before sandbox-init continues, the settings that it may not make in its user namespace. A process that has ended is
// os.ErrProcessDone.
func (c *container) confine(m *mounts) (err error) {
	defer func() {
		if errors.Is(err, os.ErrNotExist) { // its directory in /proc is gone
			err = errors.Join(os.ErrProcessDone, err)
		}
	}()
	proc := fmt.Sprintf("/proc/%d/", c.init.Pid())
	if adj := c.plan.OOMScoreAdj; adj != nil {
		value := strconv.Itoa(int(*adj))
		path := proc + "oom_score_adj"
		// An unchanged value is not written: even that may need a capability that the host does not grant.
		if now, err := os.ReadFile(path); err != nil || strings.TrimSpace(string(now)) != value {
			if err := os.WriteFile(path, []byte(value), 0); err != nil {
				return fmt.Errorf("setting the OOM score: %w", err)
			}
		}
	}
	if c.plan.FirstID == 0 {
		return nil
	}
	users, err := os.Open(proc + "ns/user")
	if err != nil {
		return err
	}
	defer users.Close()
	return m.mapOwners(users)
}

func flags(p *plan.Plan) uintptr {
	f := uintptr(unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC)
	if p.OwnNetwork {
		f |= unix.CLONE_NEWNET
	}
	if p.OwnCgroup {
		f |= unix.CLONE_NEWCGROUP
	}
	return f
}

// begun reports whether a container is more than a sandbox-init that waits, which may be deleted without being killed: containerd does that when a
// create fails.
func (c *container) begun() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.started || c.init == nil {
		return c.started
	}
	_, err := c.link.confinement()
	return !errors.Is(err, errUnclaimed)
}

// abandon ends and removes all of a container that could not be created. If the cgroup cannot be read now, an error says so, and the process is
// ended all the same: it has the whole PID namespace with it.
func (s *Service) abandon(c *container) error {
	err := s.destroy(c)
	if c.init != nil {
		_ = c.init.Signal(unix.SIGKILL)
		<-c.init.Done()
		c.init.Close()
	}
	c.link.close()
	if c.streams != nil {
		c.streams.Close()
	}
	return err
}

// destroy ends and removes all of a container that has no task, or whose task is deleted. Safe to repeat.
func (s *Service) destroy(c *container) error {
	if c.init != nil {
		if err := s.kill(c); err != nil {
			return err
		}
		<-c.init.Done()
		s.settle(c)
	}
	c.link.close()
	if c.streams != nil {
		ctx, cancel := context.WithTimeout(context.Background(), drainTime)
		c.streams.Drained(ctx)
		cancel()
		c.streams.Close()
	}
	if c.plan.Anchor {
		return nil
	}
	return Remove(s.cgroups, c.plan.Cgroup)
}

// settle waits until all that was executed in a container whose first process has ended has ended as well, and is reported.
func (s *Service) settle(c *container) {
	c.entering.Lock() // what was about to enter it has failed, or is in its cgroup now
	_ = s.cgroups.Signal(c.plan.Cgroup, unix.SIGKILL)
	c.entering.Unlock()
	for _, e := range c.executions() {
		e.mu.Lock()
		ends := e.phase != added
		e.mu.Unlock()
		if ends {
			<-e.done
		}
	}
}

// kill kills the container's processes, frozen or not: its first process takes those of its PID namespace with it. What is just entering the
// container is left to settle.
func (s *Service) kill(c *container) error {
	err := s.cgroups.Thaw(c.plan.Cgroup)
	if signalErr := c.init.Signal(unix.SIGKILL); !errors.Is(signalErr, os.ErrProcessDone) {
		err = errors.Join(err, signalErr)
	}
	return err
}

// signal signals the container's own process, which is sandbox-init until its claim runs.
func (c *container) signal(sig unix.Signal) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	sent, err := c.link.signal(sig)
	if !sent {
		return c.init.Signal(sig)
	}
	return err
}

// Remove kills what is left in the cgroup of a container, and removes it.
func Remove(t *cgroup.Tree, path string) error {
	if err := t.Signal(path, unix.SIGKILL); err != nil {
		return err
	}
	return t.Remove(path)
}

// setUp tells sandbox-init what to make, and waits until it has.
func setUp(ctx context.Context, conn *os.File, s *wire.Setup) error {
	payload, err := wire.EncodeSetup(s)
	if err != nil {
		return fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	}
	stop, err := bounded(ctx, conn)
	if err != nil {
		return err
	}
	defer stop()
	_, err = conn.Write(wire.Frame(wire.TypeSetup, payload))
	kind, answer, readErr := claim.ReadFrame(conn)
	switch {
	case readErr == nil && kind == wire.TypeReady:
		return err
	case readErr == nil:
		return failureOf(kind, answer)
	case err != nil:
		readErr = errors.Join(err, readErr)
	}
	if ended := ctx.Err(); ended != nil {
		return ended
	}
	return fmt.Errorf("waiting for sandbox-init: %w", readErr)
}
