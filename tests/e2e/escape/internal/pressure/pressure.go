// Package pressure makes the attempts that take the node's resources, while it measures a neighbor: a sandbox of another tenant that does
// a fixed piece of work again and again. Its functions must not be called concurrently: two bombs at once would be measured as one.
package pressure

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"sync"
	"time"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/load"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
)

const (
	// calmTime is how long the neighbor is measured before each bomb, and stormTime how long during it.
	calmTime  = 4 * time.Second
	stormTime = 8 * time.Second
	// settleTime is how long a bomb that was deleted may still be felt.
	settleTime = time.Second
	beginTime  = 15 * time.Second
	bombName   = "bomb"
)

// Limits of the hostile tenant's pool, far below the defaults, so that they are reached within seconds.
const (
	DiskBytes  = 256 << 20
	DiskInodes = 50_000
)

// AgentEnv returns the environment of the agents of the hostile pool.
func AgentEnv() map[string]string {
	return map[string]string{"FSB_SANDBOX_DISK_BYTES": strconv.Itoa(DiskBytes), "FSB_SANDBOX_DISK_INODES": strconv.Itoa(DiskInodes)}
}

// running is a load in a sandbox of the hostile tenant.
type running struct {
	begun chan struct{}
	done  chan struct{}
	once  sync.Once

	mu    sync.Mutex
	lines []load.Line
}

// start creates a sandbox with a load and waits until it has begun.
func start(ctx context.Context, s *mesh.Scene, seconds int, loadArgs ...string) (*running, error) {
	args := append([]string{loadArgs[0], strconv.Itoa(seconds)}, loadArgs[1:]...)
	_, err := s.Hostile.Create(ctx, bombName, &sandboxv1.SandboxSpec{Image: inside.RootImage, Args: args, Env: map[string]string{attack.EnvName: s.Env.String()}})
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", loadArgs[0], err)
	}
	r := &running{begun: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(r.done)
		_ = s.Hostile.Output(ctx, bombName, r.add) // a sandbox that is ended breaks it off
	}()
	timer := time.NewTimer(beginTime)
	defer timer.Stop()
	select {
	case <-r.begun:
		return r, nil
	case <-timer.C:
		return r, fmt.Errorf("starting %s: it has printed nothing", loadArgs[0])
	case <-ctx.Done():
		return r, ctx.Err()
	}
}

func (r *running) add(line []byte) {
	var l load.Line
	structured := json.Unmarshal(line, &l) == nil
	// The first line of a log that is full may be trimmed before it is read.
	if l.Kind == load.KindBegun || bytes.HasPrefix(line, []byte(load.Filler)) {
		r.once.Do(func() { close(r.begun) })
	}
	if !structured {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, l)
}

// find returns the last line of a kind.
func (r *running) find(kind string) (load.Line, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := len(r.lines) - 1; i >= 0; i-- {
		if r.lines[i].Kind == kind {
			return r.lines[i], true
		}
	}
	return load.Line{}, false
}

// most returns the largest count of any line.
func (r *running) most() (n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.lines {
		n = max(n, l.Count)
	}
	return n
}

// finish deletes the sandbox of a load and waits until nothing is left of it.
func finish(ctx context.Context, s *mesh.Scene) error {
	if err := s.Hostile.Delete(ctx, bombName); err != nil {
		return err
	}
	err := mesh.Poll(ctx, mesh.SettleTime, func(ctx context.Context) error {
		left, err := s.Containers(ctx, s.Hostile.Namespace, bombName)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("containers are left: %v", left)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("removing the bomb: %w", err)
	}
	return mesh.Wait(ctx, settleTime)
}

// measure measures the neighbor before a load, starts that, and measures the neighbor again. The load is left running.
func measure(ctx context.Context, s *mesh.Scene, n *Samples, seconds int, loadArgs ...string) (calm, storm Window, r *running, err error) {
	from := time.Now()
	if err := mesh.Wait(ctx, calmTime); err != nil {
		return calm, storm, nil, err
	}
	to := time.Now()
	if r, err = start(ctx, s, seconds, loadArgs...); err != nil {
		return calm, storm, r, err
	}
	begun := time.Now()
	timer := time.NewTimer(stormTime)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return calm, storm, r, ctx.Err()
	}
	ended := time.Now()
	// The output of the neighbor comes a little later.
	if err := mesh.Wait(ctx, settleTime); err != nil {
		return calm, storm, r, err
	}
	if calm, err = n.Window(from, to); err != nil {
		return calm, storm, r, err
	}
	storm, err = n.Window(begun, ended)
	return calm, storm, r, err
}
