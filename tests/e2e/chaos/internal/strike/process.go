package strike

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/plan"
)

// The components by their label, which is also the name of their program in its image.
const (
	allocator  = "allocator"
	controller = "controller"
	// systemCgroup is where fsb-local keeps the node's own components.
	systemCgroup = "fsb-local/system"
)

// podOf is the Pod of a Lease's holder: identities are a Pod's name, and what tells its processes apart after a `_`.
func podOf(holder string) string {
	name, _, _ := strings.Cut(holder, "_")
	return name
}

func belongs(name string, pods []corev1.Pod) bool {
	for _, p := range pods {
		if p.Name == name {
			return true
		}
	}
	return false
}

// insiders are all processes of a Pod, its pause container's included, which stays when others are killed.
func insiders(podUID string) []int { return find(func(string) bool { return true }, podUID) }

// processes finds processes by their program, and a part of their cgroup's path.
func processes(program, cgroup string) []int {
	return find(func(p string) bool { return p == program }, cgroup)
}

func find(match func(program string) bool, cgroup string) []int {
	entries, _ := os.ReadDir("/proc")
	var out []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		command, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		first, _, _ := bytes.Cut(command, []byte{0})
		if err != nil || len(first) == 0 || !match(string(first)) {
			continue
		}
		groups, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cgroup"))
		if err == nil && strings.Contains(string(groups), cgroup) {
			out = append(out, pid)
		}
	}
	return out
}

// signal sends a signal to a program's processes in a Pod, or on the node, and tells to which.
func signal(program, cgroup string, sig syscall.Signal) (string, error) {
	pids := processes(program, cgroup)
	if len(pids) == 0 {
		return "", fmt.Errorf("no process %s runs in %s", program, cgroup)
	}
	var failed error
	for _, pid := range pids {
		if err := syscall.Kill(pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
			failed = errors.Join(failed, fmt.Errorf("signalling process %d: %w", pid, err))
		}
	}
	return fmt.Sprint("pid ", pids), failed
}

func killLeader(component string) fault {
	return func(ctx context.Context, s *Striker, _ plan.Fault, out *audit.Strike) (func() error, error) {
		pod, err := s.leader(ctx, component)
		if err != nil {
			return nil, err
		}
		pids, err := signal("/"+component, string(pod.UID), syscall.SIGKILL)
		out.Target = pod.Name + " " + pids
		return nil, err
	}
}

func killAgent(ctx context.Context, s *Striker, f plan.Fault, out *audit.Strike) (func() error, error) {
	pods, err := s.agents(ctx)
	if err != nil {
		return nil, err
	}
	pod := pods[f.Pick%uint64(len(pods))]
	pids, err := signal("/agent", string(pod.UID), syscall.SIGKILL)
	out.Target = pod.Name + " " + pids
	return nil, err
}

// killAgentPod is kubectl delete --force --grace-period=0. Nothing is killed if the API server does not take it.
func killAgentPod(ctx context.Context, s *Striker, f plan.Fault, out *audit.Strike) (func() error, error) {
	pods, err := s.agents(ctx)
	if err != nil {
		return nil, err
	}
	pod := pods[f.Pick%uint64(len(pods))]
	// Even if the answer does not come it may have been taken.
	out.Target, out.AgentUID, out.AgentPod = pod.Name, string(pod.UID), pod.Name
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	return nil, s.Kube.Delete(ctx, &pod, client.GracePeriodSeconds(0), client.Preconditions{UID: &pod.UID})
}

func killNode(program string) fault {
	return func(_ context.Context, _ *Striker, _ plan.Fault, out *audit.Strike) (func() error, error) {
		pids, err := signal(program, systemCgroup, syscall.SIGKILL)
		out.Target = pids
		return nil, err
	}
}

// stallAllocator stops the leader's process without ending it, for longer than its Lease lasts: it wakes as a leader that
// was deposed and does not know it.
func stallAllocator(ctx context.Context, s *Striker, _ plan.Fault, out *audit.Strike) (func() error, error) {
	pod, err := s.leader(ctx, allocator)
	if err != nil {
		return nil, err
	}
	pids, err := signal("/"+allocator, string(pod.UID), syscall.SIGSTOP)
	out.Target = pod.Name + " " + pids
	return func() error { return wake(string(pod.UID)) }, err
}

// wake has a stalled allocator go on. One that was killed meanwhile needs no waking.
func wake(cgroup string) error {
	var failed error
	for _, pid := range processes("/"+allocator, cgroup) {
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil && !errors.Is(err, syscall.ESRCH) {
			failed = errors.Join(failed, fmt.Errorf("waking process %d: %w", pid, err))
		}
	}
	return failed
}
