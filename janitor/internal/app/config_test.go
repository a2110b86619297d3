package app_test

import (
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/janitor/internal/app"
)

func TestMain(m *testing.M) {
	// client-go's watch of metadata leaves a goroutine behind if its last event is not received.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("k8s.io/apimachinery/pkg/watch.(*filteredWatch).loop"))
}

func defaults(t *testing.T, args ...string) *app.Config {
	t.Helper()
	cfg := &app.Config{}
	fs := pflag.NewFlagSet("janitor", pflag.ContinueOnError)
	cfg.AddFlags(fs)
	require.NoError(t, fs.Parse(append([]string{"--insecure", "--node-name=node-1"}, args...)))
	return cfg
}

func TestDefaultsAreValid(t *testing.T) {
	cfg := defaults(t)
	require.NoError(t, cfg.Validate())
	require.Equal(t, 10*time.Second, cfg.Policy.Grace)
	require.Equal(t, time.Minute, cfg.ScanInterval)
	require.NoError(t, defaults(t, "--host-proc=", "--fifo-root=", "--containerd-state=").Validate(), "optional directories")
}

func TestEveryProblemIsNamed(t *testing.T) {
	err := defaults(t, "--bind-address=x", "--node-name=", "--containerd-namespace=", "--snapshotter=", "--containerd-socket=c.sock", "--log-root=",
		"--fifo-root=fifo", "--proc-root=/", "--host-proc=/proc/1/", "--containerd-state=run", "--cgroup-root=", "--grace=0", "--leftover-grace=-1s", "--scan-interval=0",
		"--log-retention=-1s", "--workers=0", "--kube-api-qps=0", "--kube-api-burst=-1").Validate()
	for _, flag := range []string{
		"bind-address", "node-name", "containerd-namespace", "snapshotter", "containerd-socket", "log-root", "fifo-root", "proc-root", "host-proc",
		"containerd-state", "cgroup-root", "grace", "leftover-grace", "scan-interval", "log-retention", "workers", "kube-api-qps", "kube-api-burst",
	} {
		require.ErrorContains(t, err, "--"+flag)
	}
}
