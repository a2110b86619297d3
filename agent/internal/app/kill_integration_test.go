//go:build integration

package app_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/app"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// TestKillNineAtAnyMoment kills the real binary while sandboxes are being created and deleted. Afterwards every acknowledged
// sandbox exists, no deleted one does, and none is incomplete.
func TestKillNineAtAnyMoment(t *testing.T) {
	binary := buildAgent(t)
	for _, handler := range []string{"runc", "fsb"} {
		for name, bound := range map[string]int{"cold": 0, "with slots": 6} {
			t.Run(handler+" "+name, func(t *testing.T) { killNine(t, binary, handler, bound) })
		}
	}
}

func killNine(t *testing.T, binary, handler string, slots int) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	claimed := 0
	for round := range 6 {
		var mu sync.Mutex
		acked, deleted := map[string]*agentv1.SandboxRecord{}, map[string]bool{}
		a, kill := spawn(t, s, binary, slotFlags(s, handler, slots)...)
		require.Eventually(t, func() bool { return a.snapshot(t).GetSlots().GetFree() == int32(slots) }, testkit.Timeout, testkit.Tick)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for worker := range 4 {
			wg.Go(func() {
				for i := 0; ctx.Err() == nil; i++ {
					r := record(fmt.Sprintf("k%d-%d-%d", round, worker, i), nil)
					uid := r.GetFence().GetSandboxUid()
					if all, err := a.create(ctx, r); err != nil || len(all) != 6 {
						t.Logf("a create ended with %d stages: %v", len(all), err)
						return
					}
					mu.Lock()
					acked[uid] = r
					mu.Unlock()
					if i%2 == 0 {
						continue
					}
					mu.Lock()
					delete(acked, uid) // from here on it may be either
					mu.Unlock()
					stream, err := a.DeleteSandbox(ctx, &agentv1.DeleteSandboxRequest{Fence: r.GetFence(), GracePeriod: durationpb.New(0)})
					if err != nil {
						return
					}
					for {
						m, err := stream.Recv()
						if err != nil {
							return
						}
						if m.GetStage() == agentv1.DeleteStage_DELETE_STAGE_REMOVED {
							break
						}
					}
					mu.Lock()
					deleted[uid] = true
					mu.Unlock()
				}
			})
		}
		require.Eventually(t, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(acked) > round
		}, testkit.Timeout, testkit.Tick)
		kill()
		cancel()
		wg.Wait()

		next := startAgent(t, s, func(c *app.Config) {
			c.RuntimeHandler, c.SlotRoot, c.SandboxInit, c.Shim, c.SlotsMax = handler, slotRoot(s), sandboxInit(), shim(), slots
		})
		known := map[string]*agentv1.SandboxReport{}
		for _, got := range next.snapshot(t).GetSandboxes() {
			known[got.GetRecord().GetFence().GetSandboxUid()] = got
		}
		for uid := range acked {
			require.Contains(t, known, uid, "it was acknowledged")
			require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, known[uid].GetState())
			if known[uid].GetStartPath() == sandboxv1.StartPath_START_PATH_SLOT {
				claimed++
			}
		}
		for uid := range deleted {
			require.NotContains(t, known, uid, "it was deleted")
		}
		for _, got := range known {
			next.delete(t, got.GetRecord().GetFence(), 0)
		}
		// containerd may complete what the killed process had asked for only now.
		require.Eventually(t, func() bool { return onlySlots(t, s, slots) }, testkit.Timeout, testkit.Tick, "what is left of the killed process")
		next.stop()
		s.CheckClean(t)
	}
	require.Equal(t, slots > 0, claimed > 0)
}

// onlySlots reports whether containerd has n slots of one agent process and nothing else of ours.
func onlySlots(t *testing.T, s *containerd.Server, n int) bool {
	t.Helper()
	containers, err := s.Client.ContainerService().List(t.Context(), fmt.Sprintf("labels.%q==true", identity.KeyManaged)) // without anchors of shims
	require.NoError(t, err)
	processes := map[string]bool{}
	for _, c := range containers {
		if c.Labels[identity.KeyState] != identity.StateSlot {
			return false
		}
		processes[c.Labels[identity.KeyAgentProcess]] = true
	}
	return len(containers) == n && len(processes) <= 1
}

func slotRoot(s *containerd.Server) string { return filepath.Join(s.Dir, "slots") }

func sandboxInit() string { return filepath.Join(config.Env("FSB_BIN"), "sandbox-init") }

func shim() string { return filepath.Join(config.Env("FSB_BIN"), "containerd-shim-fsb-v1") }

// slotFlags returns the flags for an agent that keeps slots.
func slotFlags(s *containerd.Server, handler string, slots int) []string {
	return []string{"--runtime-handler", handler, "--shim", shim(), "--slot-root", slotRoot(s), "--sandbox-init", sandboxInit(), "--slots-max", strconv.Itoa(slots)}
}

// TestLateContainersAreRemoved has containers of an earlier agent process appear in containerd after adoption.
func TestLateContainersAreRemoved(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a := startAgent(t, s, nil)
	kept := record("kept", sh("sleep 1000"))
	a.mustCreate(t, kept)
	for _, i := range []identity.Identity{
		{AgentUID: podUID, AgentProcess: "earlier", State: identity.StateSlot},
		{AgentUID: podUID, AgentProcess: "earlier", State: identity.StateClaimed, Namespace: "default", Name: "late", SandboxUID: "late", Attempt: 1},
	} {
		id := i.ContainerID()
		if i.State == identity.StateSlot {
			id = identity.SlotID("00000000000000000000")
		}
		_, err := s.Client.ContainerService().Create(t.Context(), containers.Container{
			ID: id, Labels: i.Labels(), Runtime: containers.RuntimeInfo{Name: "io.containerd.runc.v2"}, Spec: &anypb.Any{TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/Spec", Value: []byte("{}")},
		})
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		left, err := s.Client.ContainerService().List(t.Context())
		require.NoError(t, err)
		return len(left) == 1
	}, testkit.Timeout, testkit.Tick)
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, a.report(t, kept).GetState())
	a.delete(t, kept.GetFence(), 0)
}

func buildAgent(t *testing.T) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "agent")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "github.com/fast-sandbox/fast-sandbox/agent/cmd/agent")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return binary
}

// spawn runs the binary and returns a client and a function that kills it.
func spawn(t *testing.T, s *containerd.Server, binary string, args ...string) (*agent, func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := l.Addr().String()
	require.NoError(t, l.Close())
	cmd := exec.Command(binary, append([]string{"--insecure", "--bind-address", address, "--metrics-bind-address", "0", "--health-socket", "0",
		"--containerd-socket", s.Socket, "--log-root", s.LogRoot, "--state-dir", filepath.Join(s.Dir, "agent"), "--pool", "default", "--pod-name", "agent-1", "--pod-namespace", "default",
		"--pod-uid", podUID, "--pod-ip", "127.0.0.1", "--node-name", "node", "--netns-path", fmt.Sprintf("/proc/%d/ns/net", os.Getpid()), "--cgroup-parent", s.CgroupParent,
		"--capacity", "40", "--runtime-handler", "runc"}, args...)...)
	require.NoError(t, cmd.Start())
	var once sync.Once
	kill := func() {
		once.Do(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
	}
	t.Cleanup(kill)
	conn, err := rpc.Dial("passthrough:///"+address, rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	a := &agent{AgentServiceClient: agentv1.NewAgentServiceClient(conn), stop: kill}
	begun := time.Now()
	require.Eventually(t, func() bool { return a.snapshot(t) != nil }, testkit.Timeout, testkit.Tick)
	t.Logf("serving %v after its start", time.Since(begun))
	return a, kill
}
