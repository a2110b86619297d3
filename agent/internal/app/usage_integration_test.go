//go:build integration

package app_test

import (
	"io"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/app"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// metric returns the value of a metric of the pool; 0 if there is none.
func metric(t *testing.T, address, name string) float64 {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/metrics", nil)
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	m := regexp.MustCompile(`(?m)^fastsandbox_agent_` + name + `\{pool="default"\} (\S+)$`).FindSubmatch(raw)
	require.NotNil(t, m, "%s is missing in %s", name, raw)
	v, err := strconv.ParseFloat(string(m[1]), 64)
	require.NoError(t, err)
	return v
}

// TestUsage watches a real sandbox that takes memory and processor time until it ends. What it has used stays in the metrics.
func TestUsage(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	metrics, address := l.Addr().String(), ""
	require.NoError(t, l.Close())
	a := startAgent(t, s, func(c *app.Config) { c.MetricsAddress, address = metrics, c.BindAddress })
	conn, err := rpc.Dial("passthrough:///"+address, rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}})
	require.NoError(t, err)
	defer conn.Close()
	client := usagev1.NewUsageServiceClient(conn)

	script := `i=0; s=x; while [ $i -lt 23 ]; do s=$s$s; i=$((i+1)); done; while :; do read -r u rest </proc/uptime; [ ${u%%.*} -ge $1 ] && exit 3; done`
	r := record("burns", func(spec *sandboxv1.SandboxSpec) {
		spec.Command = []string{"sh", "-c", `set -- $(($(cut -d. -f1 /proc/uptime) + 4)); ` + script}
		spec.Network = sandboxv1.NetworkMode_NETWORK_MODE_NONE
		spec.Resources = &sandboxv1.ResourceLimits{MemoryBytes: 128 << 20}
	})
	a.mustCreate(t, r)
	ctx := rpc.ForTarget(t.Context(), rpc.Target{SandboxUID: r.GetFence().GetSandboxUid(), Attempt: 1, AgentUID: podUID})
	stream, err := client.WatchSandboxUsage(ctx, &usagev1.WatchSandboxUsageRequest{Namespace: "default", Name: "burns", Interval: durationpb.New(250 * time.Millisecond)})
	require.NoError(t, err)
	var readings []*usagev1.SandboxUsage
	for {
		m, err := stream.Recv()
		require.NoError(t, err)
		if end := m.GetEnded(); end != nil {
			require.EqualValues(t, 3, end.GetExitCode())
			require.Equal(t, "Error", end.GetReason())
			require.NotNil(t, end.GetFinishTime())
			break
		}
		readings = append(readings, m.GetUsage())
	}
	_, err = stream.Recv()
	require.ErrorIs(t, err, io.EOF)
	require.Greater(t, len(readings), 6, "4 s, of which the last part may be cut off")
	last := readings[len(readings)-1]
	for i, next := range readings[1:] {
		require.GreaterOrEqual(t, next.GetCpu().GetTotal().AsDuration(), readings[i].GetCpu().GetTotal().AsDuration())
		require.True(t, next.GetReadTime().AsTime().After(readings[i].GetReadTime().AsTime()))
	}
	used := last.GetCpu().GetTotal().AsDuration()
	require.Greater(t, used, 500*time.Millisecond)
	require.Greater(t, last.GetMemory().GetPeakBytes(), int64(8<<20))
	require.EqualValues(t, 128<<20, last.GetMemory().GetLimitBytes())
	require.Equal(t, "burns", last.GetName())
	require.Equal(t, r.GetFence().GetSandboxUid(), last.GetUid())
	running := readings[len(readings)/2] // at the last one its process may just have ended
	require.NotNil(t, running.GetNetwork())
	require.Zero(t, running.GetNetwork().GetSentBytes())
	require.True(t, last.GetStartTime().IsValid())

	counted := metric(t, metrics, "sandboxes_cpu_seconds_total")
	require.GreaterOrEqual(t, counted, used.Seconds(), "what it has used after the last reading is counted too")
	require.EqualValues(t, 1, metric(t, metrics, "sandbox_memory_peak_bytes_count"))
	require.Zero(t, metric(t, metrics, "sandboxes_processes"))
	short := record("short", sh("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"))
	a.mustCreate(t, short)
	a.ended(t, "short")
	require.Greater(t, metric(t, metrics, "sandboxes_cpu_seconds_total"), counted, "it has lived between two scrapes")

	stays := record("stays", nil)
	a.mustCreate(t, stays)
	all, err := client.ListSandboxUsage(t.Context(), &usagev1.ListSandboxUsageRequest{Namespace: "default"})
	require.NoError(t, err)
	m, err := all.Recv()
	require.NoError(t, err)
	require.Empty(t, m.GetError())
	require.Len(t, m.GetSandboxes(), 1, "those that have ended use nothing")
	require.Equal(t, "stays", m.GetSandboxes()[0].GetName())
	require.Nil(t, m.GetSandboxes()[0].GetNetwork(), "it shares that of its agent")
	require.Positive(t, metric(t, metrics, "sandboxes_memory_working_set_bytes"))
	for _, f := range []*agentv1.Fence{r.GetFence(), short.GetFence(), stays.GetFence()} {
		a.delete(t, f, 0)
	}
}
