//go:build integration

package app_test

import (
	"io"
	"net"
	"net/url"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/app"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// proxy forwards connections until it is cut.
type proxy struct {
	listener net.Listener
	target   string
	wg       sync.WaitGroup

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]bool
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{listener: l, target: target, conns: map[net.Conn]bool{}}
	p.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.wg.Go(func() { p.pass(c) })
		}
	})
	t.Cleanup(func() {
		p.setCut(true)
		_ = l.Close()
		p.wg.Wait()
	})
	return p
}

// setCut breaks all connections and accepts none, or accepts them again.
func (p *proxy) setCut(cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = cut
	for c := range p.conns {
		if cut {
			_ = c.Close()
		}
	}
}

func (p *proxy) pass(c net.Conn) {
	defer c.Close()
	up, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer up.Close()
	p.mu.Lock()
	if p.cut {
		p.mu.Unlock()
		return
	}
	p.conns[c], p.conns[up] = true, true
	p.mu.Unlock()
	done := make(chan struct{})
	p.wg.Go(func() {
		defer close(done)
		_, _ = io.Copy(up, c)
		_ = up.Close()
	})
	_, _ = io.Copy(c, up)
	_ = c.Close()
	<-done
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
	delete(p.conns, up)
}

// TestNothingIsRemovedDuringAnOutageOfTheAPIServer, and all orphans are removed after it.
func TestNothingIsRemovedDuringAnOutageOfTheAPIServer(t *testing.T) {
	w := newTestEnv(t)
	host, err := url.Parse(w.rest.Host)
	if err != nil || host.Host == "" {
		host = &url.URL{Host: w.rest.Host}
	}
	p := newProxy(t, host.Host)
	w.rest = rest.CopyConfig(w.rest)
	w.rest.Host = "https://" + p.listener.Addr().String()
	alive, gone := w.pod("agent-alive"), w.pod("agent-gone")
	healthy, absent, orphan := claimed("healthy", alive), claimed("absent", alive), claimed("orphan", gone)
	w.sandbox(healthy)
	sandbox := w.sandbox(absent)
	w.sandbox(orphan)
	kept := w.container(healthy.ContainerID(), healthy.Labels(), verdict.Running)
	lost := []thing{w.container(absent.ContainerID(), absent.Labels(), verdict.Running), w.container(orphan.ContainerID(), orphan.Labels(), verdict.Running)}
	metrics := freeAddress(t)
	j := w.start(func(c *app.Config) { c.MetricsAddress = metrics })
	j.verdicts(t)
	p.setCut(true)
	w.deletePod("agent-gone")
	w.strip(sandbox)
	scans := counted(t, metrics, "fastsandbox_janitor_scans_total")
	require.Eventually(t, func() bool { return counted(t, metrics, "fastsandbox_janitor_scans_total") >= scans+4 }, testkit.Timeout, testkit.Tick)
	left := w.left()
	require.True(t, left["container "+lost[0].id] && left["container "+lost[1].id], "the grace period is over, but there is no evidence")
	require.Len(t, j.verdicts(t), 3, "the API for people still answers")
	p.setCut(false)
	w.requireOnly([]thing{kept}, lost)
	j.stop()
	w.sweepAway([]thing{kept})
}
