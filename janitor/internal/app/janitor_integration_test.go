//go:build integration

package app_test

import (
	"context"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/stretchr/testify/require"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/app"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// janitor is a running janitor with a client of it.
type janitor struct {
	janitorv1.JanitorServiceClient

	stop func()
}

func (w *testEnv) settings(change func(*app.Config)) *app.Config {
	w.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(w.t, err)
	address := l.Addr().String()
	require.NoError(w.t, l.Close())
	cfg := &app.Config{
		Common:      daemon.Common{TLS: rpc.TLS{Insecure: true}, MetricsAddress: "0", HealthSocket: "0"},
		BindAddress: address, NodeName: node, ContainerdSocket: w.Socket, ContainerdNamespace: ctrd.DefaultNamespace, Snapshotter: ctrd.DefaultSnapshotter,
		LogRoot: w.LogRoot, FIFORoot: w.fifoRoot(), ProcRoot: "/proc", HostProc: "/proc/self", StateDir: w.stateDir(), CgroupRoot: ctrd.DefaultCgroupRoot,
		CgroupParents: []string{w.CgroupParent}, Policy: verdict.Policy{Grace: time.Second, LeftoverGrace: 2 * time.Second}, ScanInterval: time.Second,
		Workers: 4, KubeQPS: 100, KubeBurst: 200, Access: auth.Options{KeyNamespace: auth.DefaultKeyNamespace},
	}
	if change != nil {
		change(cfg)
	}
	require.NoError(w.t, cfg.Validate())
	return cfg
}

// start runs a janitor until it is stopped, or the test ends.
func (w *testEnv) start(change func(*app.Config)) *janitor {
	w.t.Helper()
	cfg := w.settings(change)
	log := funcr.New(func(prefix, args string) {
		w.t.Log(prefix, args)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.said = append(w.said, prefix+" "+args)
	}, funcr.Options{})
	ctx, cancel := context.WithCancel(logr.NewContext(context.Background(), log))
	done := make(chan error, 1)
	go func() { done <- app.Serve(ctx, cfg, w.rest) }()
	conn, err := rpc.Dial("passthrough:///"+cfg.BindAddress, rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}})
	require.NoError(w.t, err)
	stopped := false
	j := &janitor{JanitorServiceClient: janitorv1.NewJanitorServiceClient(conn), stop: func() {
		if !stopped {
			stopped = true
			require.NoError(w.t, conn.Close())
			cancel()
			require.NoError(w.t, <-done)
		}
	}}
	w.t.Cleanup(j.stop)
	return j
}

// logged reports whether a janitor has logged all of the words in one record.
func (w *testEnv) logged(words ...string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.said, func(line string) bool {
		return !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(line, word) })
	})
}

// verdicts waits until there are any, and returns them by container and kind of remnant.
func (j *janitor) verdicts(t *testing.T) map[string]janitorv1.Reason {
	t.Helper()
	var resp *janitorv1.ListVerdictsResponse
	require.Eventually(t, func() bool {
		var err error
		resp, err = j.ListVerdicts(t.Context(), &janitorv1.ListVerdictsRequest{})
		return err == nil
	}, testkit.Timeout, testkit.Tick)
	out := map[string]janitorv1.Reason{}
	for _, v := range resp.GetVerdicts() {
		name := v.GetContainerId()
		if r := v.GetRemnant(); r != nil {
			name += " " + r.GetKind().String()
		}
		out[name] = v.GetReason()
	}
	return out
}
