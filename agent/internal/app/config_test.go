package app_test

import (
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/app"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
)

func TestValidateNamesEveryProblem(t *testing.T) {
	err := (&app.Config{BindAddress: "nowhere", RuntimeHandler: "docker", ContainerdSocket: "c.sock", PodIP: "x", NetNSPath: "rel", AddCapabilities: []string{"SYS_ADMIN"}}).Validate()
	for _, flag := range []string{
		"--bind-address", "--capacity", "--runtime-handler", "--containerd-socket", "--log-root", "--netns-path", "--pool", "--pod-name",
		"--pod-namespace", "--pod-uid", "--node-name", "--pod-ip", "--log-max-bytes", "--create-timeout", "--tls-cert-file",
		"--containerd-namespace", "--snapshotter", "--image-max-bytes", "--image-policy", "--sandbox-add-capabilities",
	} {
		require.ErrorContains(t, err, flag)
	}
}

func TestEnvironmentOfAnAgentPod(t *testing.T) {
	for env, value := range map[string]string{
		"AGENT_CAPACITY": "7", "CONTAINERD_SOCKET": "/run/x.sock", "AGENT_RUNTIME_HANDLER": "crun", "AGENT_POOL": "p", "POD_NAME": "n",
		"POD_NAMESPACE": "ns", "POD_UID": "u", "POD_IP": "10.0.0.1", "NODE_NAME": "node", "FSB_INSECURE": "true", "FSB_CREATE_TIMEOUT": "5s",
		"FSB_SANDBOX_MAX_CPU_MILLIS": "2000", "FSB_SANDBOX_MAX_MEMORY_BYTES": "1073741824", "FSB_SANDBOX_MAX_PIDS": "100", "FSB_IMAGE_POLICY": "Verify",
		"FSB_SANDBOX_ADD_CAPABILITIES": "NET_RAW,MKNOD",
	} {
		t.Setenv(env, value)
	}
	var cfg app.Config
	cmd := &cobra.Command{}
	cfg.AddFlags(cmd.Flags())
	require.NoError(t, cmd.Flags().Parse([]string{"--pool", "flag"}))
	require.NoError(t, config.Load(cmd, daemon.EnvPrefix))
	require.NoError(t, cfg.Validate())
	require.Equal(t, 7, cfg.Capacity)
	require.Equal(t, "Verify", cfg.ImagePolicy)
	require.Equal(t, []string{"NET_RAW", "MKNOD"}, cfg.AddCapabilities)
	require.Equal(t, resources.Limits{CPUMillis: 2000, MemoryBytes: 1 << 30, PIDs: 100}, cfg.MaxLimits)
	require.Equal(t, "/run/x.sock", cfg.ContainerdSocket)
	require.Equal(t, "crun", cfg.RuntimeHandler)
	require.Equal(t, "flag", cfg.Pool, "a flag wins")
	require.Equal(t, "10.0.0.1", cfg.PodIP)
	require.Equal(t, 5*time.Second, cfg.CreateTimeout)
	require.Equal(t, ":5758", cfg.BindAddress)
	require.Equal(t, int64(16<<20), cfg.LogMaxBytes)
}
