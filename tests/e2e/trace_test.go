//go:build e2e

package e2e_test

import (
	"compress/gzip"
	"context"
	"encoding/hex"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

// span is the part of a span that tests need.
type span struct{ trace, id, parent, service, name string }

// collector receives spans by OTLP over HTTP.
type collector struct {
	mu    sync.Mutex
	spans []span
}

// ServeHTTP receives one export.
func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		unzipped, err := gzip.NewReader(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		body = unzipped
	}
	raw, err := io.ReadAll(body)
	var export collectorv1.ExportTraceServiceRequest
	if err != nil || proto.Unmarshal(raw, &export) != nil {
		http.Error(w, "not an export", http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range export.GetResourceSpans() {
		service := ""
		for _, a := range resource.GetResource().GetAttributes() {
			if a.GetKey() == "service.name" {
				service = a.GetValue().GetStringValue()
			}
		}
		for _, scope := range resource.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				c.spans = append(c.spans, span{hex.EncodeToString(s.GetTraceId()), hex.EncodeToString(s.GetSpanId()),
					hex.EncodeToString(s.GetParentSpanId()), service, s.GetName()})
			}
		}
	}
}

func (c *collector) of(trace string) []span {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []span
	for _, s := range c.spans {
		if s.trace == trace {
			out = append(out, s)
		}
	}
	return out
}

// listenOnNode listens inside the cluster's network namespace, at the address that the mesh exports its spans to.
func listenOnNode(t *testing.T, address string) net.Listener {
	t.Helper()
	type result struct {
		l   net.Listener
		err error
	}
	done := make(chan result)
	go func() {
		// The thread is never unlocked: it ends with the goroutine, so no other goroutine runs in the namespace.
		runtime.LockOSThread()
		ns, err := os.Open("/run/netns/fsb-local")
		if err != nil {
			done <- result{err: err}
			return
		}
		defer func() { _ = ns.Close() }()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- result{err: err}
			return
		}
		l, err := net.Listen("tcp", address)
		done <- result{l, err}
	}()
	r := <-done
	require.NoError(t, r.err)
	return r.l
}

// TestOneTraceRunsThroughTheMesh follows one create from fsb-ctl to the process's environment.
func TestOneTraceRunsThroughTheMesh(t *testing.T) {
	c := &collector{}
	server := &http.Server{Handler: c, ReadHeaderTimeout: 5 * time.Second}
	listener := listenOnNode(t, "10.200.0.2:4318")
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		require.NoError(t, server.Shutdown(context.WithoutCancel(t.Context())))
		require.ErrorIs(t, <-done, http.ErrServerClosed)
	})
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://10.200.0.2:4318")
	r := cluster.Run(t, "", "fsb-ctl", "run", uniqueName("traced"), "--image", cluster.Busybox, "--rm", "--", "sh", "-c", "echo $TRACEPARENT")
	require.Zero(t, r.Code, r.Stderr)
	require.Regexp(t, `^00-[0-9a-f]{32}-[0-9a-f]{16}-01\n$`, r.Stdout)
	trace := r.Stdout[3:35]

	want := []struct{ service, name string }{
		{"fsb-ctl", "fastsandbox.sandbox.v1.SandboxService/CreateSandbox"},
		{"allocator", "fastsandbox.sandbox.v1.SandboxService/CreateSandbox"},
		{"allocator", "reserve"},
		{"allocator", "fastsandbox.agent.v1.AgentService/CreateSandbox"},
		{"agent", "fastsandbox.agent.v1.AgentService/CreateSandbox"},
		{"agent", "image"}, {"agent", "snapshot"}, {"agent", "container"}, {"agent", lastStage(r.Stderr)},
	}
	var missing []string
	require.True(t, eventually(30*time.Second, func() bool {
		missing = nil
		spans := c.of(trace)
		for _, w := range want {
			found := false
			for _, s := range spans {
				found = found || (s.service == w.service && s.name == w.name)
			}
			if !found {
				missing = append(missing, w.service+" "+w.name)
			}
		}
		return len(missing) == 0
	}), "missing: %v of %v", missing, c.of(trace))
	// Each process sends its spans when it has some together: a child may come before its parent.
	var roots []span
	require.True(t, eventually(30*time.Second, func() bool {
		roots = rootsOf(c.of(trace))
		return len(roots) == 1
	}), "roots of the trace: %v", roots)
	require.Equal(t, "fsb-ctl", roots[0].service)

	// The write of the custom resource comes behind, and may be overtaken by --rm; a sandbox that stays has it.
	name := uniqueName("written")
	out := cluster.Run(t, "", "fsb-ctl", "run", name, "--image", cluster.Busybox, "--", "sleep", "60")
	require.Zero(t, out.Code, out.Stderr)
	cr := customResource(t, name, running)
	t.Cleanup(func() { cluster.OK(t, "fsb-ctl", "delete", name) })
	written := cr.Annotations["fast-sandbox.io/traceparent"]
	require.Len(t, written, 55)
	require.True(t, eventually(30*time.Second, func() bool {
		for _, s := range c.of(written[3:35]) {
			if s.service == "allocator" && s.name == "CR write" {
				return true
			}
		}
		return false
	}), "%v", c.of(written[3:35]))
}

// rootsOf are the spans whose parent is not in the trace.
func rootsOf(spans []span) []span {
	ids := map[string]bool{}
	for _, s := range spans {
		ids[s.id] = true
	}
	var roots []span
	for _, s := range spans {
		if !ids[s.parent] {
			roots = append(roots, s)
		}
	}
	return roots
}
