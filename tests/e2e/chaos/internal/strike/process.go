package strike

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/shim"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/plan"
)

// The components by their label, which is also the name of their program in its image.
const (
	allocator  = "allocator"
	controller = "controller"
	janitor    = "janitor"
	gc         = "gc"
	gateway    = "gateway"
	// systemCgroup is where fsb-local keeps the node's own components.
	systemCgroup = "fsb-local/system"
	// multiCall is the program that is every component of Kubernetes on the node.
	multiCall = "fsb-local"
)

// podOf returns the Pod of a Lease's holder. An identity is the Pod's name, a `_`, and an id of the process.
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

// insiders returns all processes of a Pod. Among them is that of the pause container, which remains when others are killed.
func insiders(podUID string) []int { return find(func(int) bool { return true }, podUID) }

// processes finds processes by the program that the kernel executes, and a part of their cgroup's path: by its path in its image, or
// by its name if it runs on the node. A sandbox, which is in the cgroup of its agent's Pod, is none of them, whatever it executes.
func processes(program, cgroup string) []int {
	return find(func(pid int) bool { return runs(pid, program) && !isSandbox(pid) }, cgroup)
}

// runs reports whether a process executes a program. fsb-local is many programs in one, which differ by their first argument.
func runs(pid int, program string) bool {
	exe, err := os.Readlink(procFile(pid, "exe"))
	if err != nil {
		return false // a thread of the kernel, or it has ended
	}
	exe = strings.TrimSuffix(exe, " (deleted)") // rebuilt meanwhile
	if filepath.IsAbs(program) {
		return exe == program
	}
	if filepath.Base(exe) != multiCall {
		return filepath.Base(exe) == program
	}
	command, err := os.ReadFile(procFile(pid, "cmdline"))
	first, _, _ := bytes.Cut(command, []byte{0})
	return err == nil && string(first) == program
}

// isSandbox reports whether a process is in a sandbox's cgroup.
func isSandbox(pid int) bool {
	groups, _ := os.ReadFile(procFile(pid, "cgroup"))
	for line := range strings.Lines(string(groups)) {
		if strings.HasPrefix(filepath.Base(strings.TrimSpace(line)), ctrd.CgroupPrefix) {
			return true
		}
	}
	return false
}

// find returns the processes in a cgroup that match, except those that have ended.
func find(match func(pid int) bool, cgroup string) []int {
	entries, _ := os.ReadDir("/proc")
	var out []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if _, err := os.Readlink(procFile(pid, "exe")); err != nil {
			continue
		}
		groups, err := os.ReadFile(procFile(pid, "cgroup"))
		if err == nil && strings.Contains(string(groups), cgroup) && match(pid) {
			out = append(out, pid)
		}
	}
	return out
}

func procFile(pid int, name string) string { return filepath.Join("/proc", strconv.Itoa(pid), name) }

// signal sends a signal to a program's processes in a Pod, or on the node, and returns their pids as text.
func signal(program, cgroup string, sig syscall.Signal) (string, error) {
	pids := processes(program, cgroup)
	if len(pids) == 0 {
		return "", fmt.Errorf("no process %s runs in %s", program, cgroup)
	}
	var failed error
	for _, pid := range pids {
		if err := syscall.Kill(pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
			failed = errors.Join(failed, fmt.Errorf("signaling process %d: %w", pid, err))
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

// killPod kills the process of one Pod of a component that has no leader.
func killPod(component string) fault {
	return func(ctx context.Context, s *Striker, f plan.Fault, out *audit.Strike) (func() error, error) {
		pods, err := s.component(ctx, component)
		if err != nil {
			return nil, err
		}
		pod := pods[f.Pick%uint64(len(pods))]
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

// killAgentPod is kubectl delete --force --grace-period=0. Nothing is killed if the API server refuses it.
func killAgentPod(ctx context.Context, s *Striker, f plan.Fault, out *audit.Strike) (func() error, error) {
	pods, err := s.agents(ctx)
	if err != nil {
		return nil, err
	}
	pod := pods[f.Pick%uint64(len(pods))]
	// Without an answer it may have been accepted.
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

// stallAllocator stops the leader's process for longer than its Lease lasts: when it resumes, it has lost leadership and does
// not know it.
func stallAllocator(ctx context.Context, s *Striker, _ plan.Fault, out *audit.Strike) (func() error, error) {
	pod, err := s.leader(ctx, allocator)
	if err != nil {
		return nil, err
	}
	pids, err := signal("/"+allocator, string(pod.UID), syscall.SIGSTOP)
	out.Target = pod.Name + " " + pids
	return func() error { return resume(string(pod.UID)) }, err
}

// resume resumes a stopped allocator. One that was killed meanwhile is not there to be resumed.
func resume(cgroup string) error {
	var failed error
	for _, pid := range processes("/"+allocator, cgroup) {
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil && !errors.Is(err, syscall.ESRCH) {
			failed = errors.Join(failed, fmt.Errorf("resuming process %d: %w", pid, err))
		}
	}
	return failed
}

// killShim kills one of the shims of an agent's sandboxes.
func killShim(ctx context.Context, s *Striker, f plan.Fault, out *audit.Strike) (func() error, error) {
	pods, err := s.agents(ctx)
	if err != nil {
		return nil, err
	}
	pod := pods[f.Pick%uint64(len(pods))]
	shims := processes(shim.Binary, string(pod.UID))
	if len(shims) == 0 {
		return nil, fmt.Errorf("no shim of agent %s runs", pod.Name)
	}
	pid := shims[f.Pick/uint64(len(pods))%uint64(len(shims))]
	// Those that it has begun to start meanwhile are not acknowledged.
	out.Target, out.Containers = fmt.Sprintf("%s pid [%d]", pod.Name, pid), containersOf(pid)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return nil, fmt.Errorf("signaling process %d: %w", pid, err)
	}
	return nil, nil
}

// containersOf returns the containers of a shim, by the cgroups of its children.
func containersOf(parent int) []string {
	children := find(func(pid int) bool { return parentOf(pid) == parent }, "/"+ctrd.CgroupPrefix)
	var out []string
	for _, pid := range children {
		groups, _ := os.ReadFile(procFile(pid, "cgroup"))
		for line := range strings.Lines(string(groups)) {
			if id, ok := strings.CutPrefix(filepath.Base(strings.TrimSpace(line)), ctrd.CgroupPrefix); ok && !slices.Contains(out, id) {
				out = append(out, id)
			}
		}
	}
	return out
}

// parentOf returns the pid of a process's parent; 0 if it has none or has ended.
func parentOf(pid int) int {
	raw, err := os.ReadFile(procFile(pid, "stat"))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(raw), ") ") // the name may have a space
	fields := strings.Fields(rest)
	if len(fields) < 2 {
		return 0
	}
	parent, err := strconv.Atoi(fields[1])
	if err != nil {
		return 0
	}
	return parent
}
