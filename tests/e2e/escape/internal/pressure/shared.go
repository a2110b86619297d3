package pressure

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/load"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// Inotify takes all inotify instances of root in a sandbox, and looks whether root on the node has some left.
func Inotify(ctx context.Context, s *mesh.Scene) error {
	s.Say("inotify instances")
	attempt := suite.Attempt{Name: "namespaces: inotify instances of the node", Does: "takes all inotify instances of its user, for a second",
		Success: "root on the node has none left"}
	evidence, refused := "", error(nil)
	r, err := start(ctx, s, 10, load.Inotify)
	if err == nil {
		err = mesh.Poll(ctx, beginTime, func(context.Context) error {
			if _, ok := r.find(load.KindCount); !ok {
				return errors.New("it has not taken any")
			}
			return nil
		})
	}
	if err != nil {
		refused = suite.Brokenf("%w", err)
	} else if fd, err := unix.InotifyInit1(unix.IN_CLOEXEC); err != nil {
		evidence = "on the node: " + err.Error()
	} else {
		_ = unix.Close(fd)
		refused = errors.New("the node has some left")
	}
	s.Log.Made(attempt, "", evidence, refused)
	return finish(ctx, s)
}

// squatSeconds is how long the attacker tries to get the port.
const squatSeconds = 25

// Squat kills the agent, and has a sandbox that shares its network take its port before it is back.
func Squat(ctx context.Context, s *mesh.Scene, agent *corev1.Pod) error {
	s.Say("squatting on the agent's port")
	_, port, err := net.SplitHostPort(s.Env.Agent)
	if err != nil {
		return fmt.Errorf("reading the agent's address: %w", err)
	}
	r, err := start(ctx, s, squatSeconds, load.Squat, port)
	if err != nil {
		return err
	}
	if err := killAgent(agent); err != nil {
		return err
	}
	// The output of the sandbox comes by way of the agent, so that it is there again when the agent is.
	back := mesh.Poll(ctx, mesh.ReadyTime, func(ctx context.Context) error { return r.reread(ctx, s) })
	if back == nil {
		back = s.AwaitAgents(ctx, s.Hostile, s.Hostile.Pool, 1, 0)
	}
	evidence, refused := "", errors.New("it has not got the port")
	if line, ok := r.find(load.KindBound); ok {
		evidence = "it has bound " + line.Text
	}
	s.Log.Made(suite.Attempt{Name: "ports: take the agent's port while it restarts", Does: "binds the port as soon as the agent has ended",
		Success: "it is bound", Expected: suite.Network}, "", evidence, refused)
	evidence, refused = "", errors.New("no client has taken it for the agent")
	if line, ok := r.find(load.KindImpersonated); ok {
		evidence = "a client has sent a request: " + line.Text
	}
	s.Log.Made(suite.Attempt{Name: "ports: pose as the agent on its port", Does: "answers on the agent's port with a certificate of its own making",
		Success: "a client sends a request"}, "", evidence, refused)
	evidence, refused = "", errors.New("it is back, with all its sandboxes")
	if back != nil {
		evidence = back.Error()
	}
	s.Log.Made(suite.Attempt{Name: "ports: keep the agent from coming back", Does: "holds the agent's port for some seconds", Success: "the agent does not come back"}, "", evidence, refused)
	return finish(ctx, s)
}

// reread reads the whole output of the load again, which must have ended. After a break some of it may not have come.
func (r *running) reread(ctx context.Context, s *mesh.Scene) error {
	again := &running{begun: make(chan struct{})}
	reading, cancel := context.WithTimeout(ctx, squatSeconds*time.Second+answerTime)
	defer cancel()
	if err := s.Hostile.Output(reading, bombName, again.add); err != nil {
		return err
	}
	if _, ended := again.find(load.KindDone); !ended {
		return errors.New("the output of the sandbox has no end")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = again.lines
	return nil
}

// killAgent kills the agent of a Pod, and none of its sandboxes.
func killAgent(pod *corev1.Pod) error {
	for _, pid := range mesh.Executing("/agent") {
		groups, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cgroup"))
		if err != nil || !strings.Contains(string(groups), string(pod.UID)) {
			continue
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			return fmt.Errorf("killing the agent: %w", err)
		}
		return nil
	}
	return fmt.Errorf("killing the agent: no process of Pod %s executes it", pod.Name)
}
