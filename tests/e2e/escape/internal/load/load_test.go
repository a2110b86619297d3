package load_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/load"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// output collects lines.
type output struct {
	mu    sync.Mutex
	lines []load.Line
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for line := range bytes.Lines(p) {
		var l load.Line
		if err := json.Unmarshal(line, &l); err != nil {
			return 0, err
		}
		o.lines = append(o.lines, l)
	}
	return len(p), nil
}

func (o *output) find(kind string) []load.Line {
	o.mu.Lock()
	defer o.mu.Unlock()
	var out []load.Line
	for _, l := range o.lines {
		if l.Kind == kind {
			out = append(out, l)
		}
	}
	return out
}

// start runs a load until what it returns is called, or it ends by itself.
func start(t *testing.T, args ...string) (o *output, stop func()) {
	t.Helper()
	o = &output{}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- load.Run(ctx, o, &attack.Env{Secret: "secret"}, args) }()
	stop = sync.OnceFunc(func() { cancel(); require.NoError(t, <-done) })
	t.Cleanup(stop)
	return o, stop
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}

func TestNeighborMeasuresAndServes(t *testing.T) {
	port := freePort(t)
	o, stop := start(t, load.Neighbor, "60", port, "load-test")
	require.Eventually(t, func() bool { return len(o.find(load.KindSample)) >= 3 }, testkit.Timeout, testkit.Tick)
	conn, err := net.Dial("tcp", "127.0.0.1:"+port)
	require.NoError(t, err)
	_, err = conn.Write([]byte("x"))
	require.NoError(t, err)
	echo := make([]byte, 1)
	_, err = conn.Read(echo)
	require.NoError(t, err)
	require.Equal(t, "x", string(echo))
	require.NoError(t, conn.Close())
	conn, err = net.Dial("unix", "@load-test")
	require.NoError(t, err)
	answer := make([]byte, 6)
	_, err = conn.Read(answer)
	require.NoError(t, err)
	require.Equal(t, "secret", string(answer))
	require.NoError(t, conn.Close())
	stop()
	samples := o.find(load.KindSample)
	require.Positive(t, samples[0].Micros)
	require.Positive(t, samples[0].SyncMicros, "the first one waits for the disk")
	require.Zero(t, samples[1].SyncMicros)
	require.Empty(t, o.find(load.KindFailed))
}

// TestFloodOpensStreams floods a server of net/http, which must have seen the requests.
func TestFloodOpensStreams(t *testing.T) {
	for name, encrypted := range map[string]bool{"tls": true, "plain": false} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			var paths []string
			server := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				mu.Lock()
				defer mu.Unlock()
				paths = append(paths, r.Method+" "+r.URL.Path)
			}))
			server.EnableHTTP2 = true
			server.Config.Protocols = &http.Protocols{}
			server.Config.Protocols.SetHTTP2(true)
			server.Config.Protocols.SetUnencryptedHTTP2(true)
			if encrypted {
				server.StartTLS()
			} else {
				server.Start()
			}
			defer server.Close()
			o, stop := start(t, load.Flood, "60", name, server.Listener.Addr().String())
			seen := func() bool {
				mu.Lock()
				defer mu.Unlock()
				return len(paths) > 100
			}
			require.Eventually(t, seen, testkit.Timeout, testkit.Tick)
			stop()
			require.Greater(t, o.find(load.KindDone)[0].Count, int64(100))
			mu.Lock()
			defer mu.Unlock()
			require.True(t, slices.Contains(paths, "POST /fastsandbox.sandbox.v1.SandboxService/ListSandboxes"), paths[0])
		})
	}
	o, _ := start(t, load.Flood, "1", "plain", "127.0.0.1:1")
	require.Eventually(t, func() bool { return len(o.find(load.KindFailed)) == 1 }, testkit.Timeout, testkit.Tick, "a flood that reaches nothing is no flood")
}

// TestSquat takes a port as soon as it is free. A client that verifies the certificate is not impersonated, one that does not is.
func TestSquat(t *testing.T) {
	for name, c := range map[string]struct {
		config       *tls.Config
		impersonated bool
	}{
		"a client that verifies":    {&tls.Config{ServerName: "agent.fast-sandbox.io"}, false},
		"a client that is careless": {&tls.Config{InsecureSkipVerify: true}, true},
	} {
		t.Run(name, func(t *testing.T) {
			owner, err := net.Listen("tcp", ":0")
			require.NoError(t, err)
			port := strconv.Itoa(owner.Addr().(*net.TCPAddr).Port)
			o, stop := start(t, load.Squat, "60", port)
			require.Never(t, func() bool { return len(o.find(load.KindBound)) > 0 }, 50*time.Millisecond, testkit.Tick)
			require.NoError(t, owner.Close())
			require.Eventually(t, func() bool { return len(o.find(load.KindBound)) > 0 }, testkit.Timeout, testkit.Tick)
			conn, err := tls.Dial("tcp", "127.0.0.1:"+port, c.config)
			require.Equal(t, c.impersonated, err == nil, "%v", err)
			if err == nil {
				_, err = conn.Write([]byte("PRI"))
				require.NoError(t, err)
				require.Eventually(t, func() bool { return len(o.find(load.KindImpersonated)) > 0 }, testkit.Timeout, testkit.Tick)
				require.NoError(t, conn.Close())
			}
			stop()
			require.Equal(t, c.impersonated, len(o.find(load.KindImpersonated)) > 0)
		})
	}
}

// TestBombsEndByThemselves: those that are harmless here do what they say.
func TestBombsEndByThemselves(t *testing.T) {
	for _, name := range []string{load.Spin, load.Sleep} {
		o, _ := start(t, name, "1")
		require.Eventually(t, func() bool { return len(o.find(load.KindDone)) == 1 }, testkit.Timeout, testkit.Tick, name)
		require.Len(t, o.find(load.KindBegun), 1)
	}
	o, _ := start(t, load.Fork, "1")
	require.Eventually(t, func() bool { return len(o.find(load.KindFailed)) == 1 }, testkit.Timeout, testkit.Tick, "only a sandbox's process may")
}

func TestInvalidArguments(t *testing.T) {
	for _, args := range [][]string{{}, {load.Sleep}, {load.Sleep, "x"}, {"nothing", "1"}} {
		require.Error(t, load.Run(t.Context(), &output{}, &attack.Env{}, args), "%q", args)
	}
}
