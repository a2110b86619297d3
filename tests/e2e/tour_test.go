//go:build e2e

package e2e_test

import (
	"context"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

// TestRunPrintsOutput is the README's first command.
func TestRunPrintsOutput(t *testing.T) {
	name := uniqueName("py")
	r := cluster.Run(t, "", "fsb-ctl", "run", name, "--image", cluster.Python, "--rm", "--", "python3", "-c", "print(6*7)")
	require.Zero(t, r.Code, "stderr: %s", r.Stderr)
	require.Equal(t, "42\n", r.Stdout)
	for _, stage := range []string{"reserve", "snapshot", lastStage(r.Stderr), "started"} {
		require.Contains(t, r.Stderr, stage, "run prints the stages")
	}
	require.NotZero(t, cluster.Run(t, "", "fsb-ctl", "get", name).Code, "--rm leaves nothing")
}

// lastStage returns the stage before the start on the path that fsb-ctl run reports.
func lastStage(stderr string) string {
	if strings.Contains(stderr, "(slot)") {
		return "claim"
	}
	return "task"
}

func TestRunReturnsExitCode(t *testing.T) {
	r := cluster.Run(t, "", "fsb-ctl", "run", uniqueName("exit"), "--image", cluster.Busybox, "--rm", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
	require.Equal(t, 7, r.Code, "stderr: %s", r.Stderr)
	require.Contains(t, r.Stdout, "out")
}

const manifest = `
apiVersion: fast-sandbox.io/v1alpha1
kind: Sandbox
metadata:
  name: NAME
  namespace: default
  labels: {app: tour}
spec:
  image: docker.io/fast-sandbox/busybox:demo
  poolRef: default
  command: [sh, -c, "i=0; while true; do i=$((i+1)); echo line $i; sleep 0.2; done"]
  exposedPorts: [8123]
`

// TestEveryClientSeesOneSandbox applies a manifest and reads the sandbox with every client.
func TestEveryClientSeesOneSandbox(t *testing.T) {
	name := uniqueName("seen")
	apply := cluster.Run(t, strings.ReplaceAll(manifest, "NAME", name), "kubectl", "apply", "-f", "-")
	require.Zero(t, apply.Code, apply.Stderr)
	cr := customResource(t, name, running)
	require.NotEmpty(t, cr.Status.Endpoints)
	require.True(t, strings.HasSuffix(cr.Status.Endpoints[0], ":8123"), cr.Status.Endpoints)
	require.Equal(t, cr.Generation, cr.Status.ObservedGeneration)
	require.Contains(t, cr.Finalizers, v1alpha1.Finalizer)

	t.Run("fsb-ctl", func(t *testing.T) {
		require.Contains(t, cluster.OK(t, "fsb-ctl", "list"), name)
		var s struct {
			Status struct{ Phase string }
		}
		require.NoError(t, json.Unmarshal([]byte(cluster.OK(t, "fsb-ctl", "get", name, "-o", "json")), &s))
		require.Equal(t, "PHASE_RUNNING", s.Status.Phase)
	})
	t.Run("grpcurl by reflection", func(t *testing.T) {
		out := cluster.OK(t, "tools/grpcurl", "-cacert", cluster.Env(t, "FSB_CACERT"), "-cert", cluster.Env(t, "FSB_CERT"), "-key", cluster.Env(t, "FSB_KEY"),
			"-d", `{"namespace":"default","name":"`+name+`"}`, cluster.Env(t, "FSB_ADDR"), "fastsandbox.sandbox.v1.SandboxService/GetSandbox")
		require.Contains(t, out, "PHASE_RUNNING")
	})
	t.Run("curl", func(t *testing.T) {
		require.Contains(t, curl(t, "/v1/namespaces/default/sandboxes/"+name), `"PHASE_RUNNING"`)
	})
	t.Run("kubectl", func(t *testing.T) {
		require.Contains(t, cluster.OK(t, "kubectl", "get", "sbx", name), "Running")
	})
	t.Run("logs follow", func(t *testing.T) { followLogs(t, name) })
	t.Run("kubectl delete", func(t *testing.T) {
		cluster.OK(t, "kubectl", "delete", "sbx", name, "--timeout=30s")
		gone(t, cluster.Namespace, name, cr.EffectiveUID())
	})
}

// followLogs reads a growing log with `fsb-ctl logs -f` and checks that no line is missing.
func followLogs(t *testing.T, name string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
	defer cancel()
	out, _ := exec.CommandContext(ctx, cluster.Binary(t, "fsb-ctl"), "logs", "-f", name).Output()
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	require.Greater(t, len(lines), 10)
	for i, line := range lines {
		require.Equal(t, "line "+itoa(i+1), line)
	}
}

// TestFastSandboxBecomesCustomResource checks that both modes reach the same custom resource.
func TestFastSandboxBecomesCustomResource(t *testing.T) {
	c := sandboxes(t)
	fast, strong := sleeper(uniqueName("fast")), sleeper(uniqueName("strong"))
	strong.Spec.ConsistencyMode = sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG
	fastResp, strongResp := create(t, c, fast), create(t, c, strong)
	require.Equal(t, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST, fastResp.GetConsistencyMode())
	require.Equal(t, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG, strongResp.GetConsistencyMode())

	seen, err := c.GetSandbox(t.Context(), &sandboxv1.GetSandboxRequest{Namespace: fast.GetNamespace(), Name: fast.GetName()})
	require.NoError(t, err, "a fast sandbox is visible at once")
	require.Equal(t, sandboxv1.Phase_PHASE_RUNNING, seen.GetSandbox().GetStatus().GetPhase())

	for req, uid := range map[*sandboxv1.CreateSandboxRequest]string{fast: fastResp.GetSandbox().GetUid(), strong: strongResp.GetSandbox().GetUid()} {
		cr := customResource(t, req.GetName(), running)
		require.Equal(t, uid, cr.EffectiveUID())
		a, err := cr.Assignment()
		require.NoError(t, err)
		require.Equal(t, cr.Status.AssignedPod, a.AgentPod)
		require.Equal(t, uid, a.SandboxUID)
		require.EqualValues(t, 1, a.Attempt)
		require.Equal(t, cluster.Pool, cr.Labels[v1alpha1.LabelPool])
		require.Equal(t, a.NodeName, cr.Labels[v1alpha1.LabelNode])
		require.Contains(t, cr.Finalizers, v1alpha1.Finalizer)
	}
}

// TestPortsAndNetwork serves HTTP in a sandbox and reads it through the endpoint, and checks that network None has no link.
func TestPortsAndNetwork(t *testing.T) {
	c := sandboxes(t)
	req := sleeper(uniqueName("web"))
	req.Spec.Ports = []int32{8199}
	req.Spec.Command = []string{"sh", "-c", "echo from-the-sandbox > /tmp/index.html; exec httpd -f -p 8199 -h /tmp"}
	resp := create(t, c, req)
	require.Len(t, resp.GetEndpoints(), 1)
	reader := cluster.Run(t, "", "fsb-ctl", "run", uniqueName("get"), "--image", cluster.Busybox, "--rm", "--",
		"sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10; do wget -q -O - http://"+resp.GetEndpoints()[0]+"/ && exit 0; sleep 0.2; done; exit 1")
	require.Zero(t, reader.Code, reader.Stderr)
	require.Equal(t, "from-the-sandbox\n", reader.Stdout)

	none := cluster.Run(t, "", "fsb-ctl", "run", uniqueName("none"), "--image", cluster.Busybox, "--network", "none", "--rm", "--", "ls", "/sys/class/net")
	require.Zero(t, none.Code, none.Stderr)
	require.Equal(t, "lo\n", none.Stdout)
}

func TestTTLExpiresSandbox(t *testing.T) {
	name := uniqueName("ttl")
	out := cluster.Run(t, "", "fsb-ctl", "run", name, "--image", cluster.Busybox, "--ttl", "3s", "--", "sleep", "600")
	require.Zero(t, out.Code, out.Stderr)
	cr := customResource(t, name, func(s *v1alpha1.Sandbox) bool { return s.Status.Phase == v1alpha1.PhaseExpired })
	require.Empty(t, cr.Status.AssignedPod)
	require.True(t, eventually(settle, func() bool { return len(leftovers(t.Context(), t, nodeClient(t), cr.EffectiveUID())) == 0 }))
	cluster.OK(t, "fsb-ctl", "delete", name)
	gone(t, cluster.Namespace, name, cr.EffectiveUID())
}
