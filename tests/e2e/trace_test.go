//go:build e2e

package e2e_test

import (
	"compress/gzip"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

// span is the part of a span that tests need.
type span struct {
	trace, id, parent, service, name string
	failed                           bool
}

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
					hex.EncodeToString(s.GetParentSpanId()), service, s.GetName(),
					s.GetStatus().GetCode() == tracev1.Status_STATUS_CODE_ERROR})
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

// collect receives the spans of the mesh, of containerd and of fsb-ctl until the test ends.
func collect(t *testing.T) *collector {
	t.Helper()
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
	return c
}

// caller starts a trace, which fsb-ctl continues, and returns its id and that of the span that calls fsb-ctl.
func caller(t *testing.T) (trace, parent string) {
	t.Helper()
	trace, parent = strings.ReplaceAll(uuid.NewString(), "-", ""), strings.ReplaceAll(uuid.NewString(), "-", "")[:16]
	t.Setenv("TRACEPARENT", "00-"+trace+"-"+parent+"-01")
	return trace, parent
}

const (
	createRPC      = "fastsandbox.sandbox.v1.SandboxService/CreateSandbox"
	deleteRPC      = "fastsandbox.sandbox.v1.SandboxService/DeleteSandbox"
	agentCreateRPC = "fastsandbox.agent.v1.AgentService/CreateSandbox"
	agentDeleteRPC = "fastsandbox.agent.v1.AgentService/DeleteSandbox"
)

// has reports whether the trace has a chain of spans, each a descendant of the one before it. A link is "SERVICE NAME"; a name
// that ends with * is a prefix.
func has(spans []span, chain ...string) bool {
	byID := map[string]span{}
	for _, s := range spans {
		byID[s.id] = s
	}
	for _, s := range spans {
		i := len(chain) - 1
		for at, ok := s, true; ok && i >= 0; at, ok = byID[at.parent] {
			if matches(at, chain[i]) {
				i--
			} else if i == len(chain)-1 {
				break // the last link must be this span itself
			}
		}
		if i < 0 {
			return true
		}
	}
	return false
}

func matches(s span, link string) bool {
	have := s.service + " " + s.name
	if prefix, ok := strings.CutSuffix(link, "*"); ok {
		return strings.HasPrefix(have, prefix)
	}
	return have == link
}

// requireTrace waits until the trace has all chains, one root (the span of fsb-ctl, called by parent), and no span that failed.
func requireTrace(t *testing.T, c *collector, trace, parent string, chains ...[]string) {
	t.Helper()
	var missing [][]string
	var roots []span
	require.True(t, eventually(30*time.Second, func() bool {
		spans := c.of(trace)
		missing, roots = nil, rootsOf(spans)
		for _, chain := range chains {
			if !has(spans, chain...) {
				missing = append(missing, chain)
			}
		}
		return len(missing) == 0 && len(roots) == 1
	}), "missing: %q\nroots: %v\nspans:\n%s", missing, roots, tree(c.of(trace)))
	require.Equal(t, "fsb-ctl", roots[0].service)
	require.Equal(t, parent, roots[0].parent)
	require.False(t, slices.ContainsFunc(c.of(trace), func(s span) bool { return s.failed }),
		"nothing failed:\n%s", tree(c.of(trace)))
	t.Logf("trace:\n%s", tree(c.of(trace)))
}

// tree formats spans with their parents, for the log of a test.
func tree(spans []span) string {
	var b strings.Builder
	var write func(parent string, depth int)
	write = func(parent string, depth int) {
		for _, s := range spans {
			if s.parent == parent {
				fmt.Fprintf(&b, "%*s%s %s%s\n", 2*depth, "", s.service, s.name, map[bool]string{true: " FAILED"}[s.failed])
				write(s.id, depth+1)
			}
		}
	}
	for _, root := range rootsOf(spans) {
		fmt.Fprintf(&b, "%s %s\n", root.service, root.name)
		write(root.id, 1)
	}
	return b.String()
}

// agentStages are the chains of a create below the agent's server span, for the path that stderr of fsb-ctl run reports.
func agentStages(stderr string, above ...string) [][]string {
	var chains [][]string
	for _, stage := range []string{"image", "snapshot", "container", lastStage(stderr)} {
		chains = append(chains, append(slices.Clone(above), "agent "+agentCreateRPC, "agent "+stage))
	}
	return append(chains, append(slices.Clone(above), "agent "+agentCreateRPC, "containerd containerd.services.*"))
}

// TestTraceOfFastCreate follows a fast create from fsb-ctl to containerd and to the process's environment.
func TestTraceOfFastCreate(t *testing.T) {
	c := collect(t)
	trace, parent := caller(t)
	name := uniqueName("traced")
	r := cluster.Run(t, "", "fsb-ctl", "run", name, "--image", cluster.Busybox, "--", "sh", "-c", "echo $TRACEPARENT; sleep 60")
	require.Zero(t, r.Code, r.Stderr)
	t.Setenv("TRACEPARENT", "") // further calls are not part of the trace
	cr := customResource(t, name, running)
	require.Equal(t, trace, cr.Annotations[v1alpha1.AnnotationTraceparent][3:35])
	require.True(t, eventually(settle, func() bool {
		return strings.HasPrefix(cluster.Run(t, "", "fsb-ctl", "logs", name).Stdout, "00-"+trace)
	}), "the process's environment must have the trace")
	above := []string{"fsb-ctl fsb-ctl run", "fsb-ctl " + createRPC, "allocator " + createRPC}
	chains := [][]string{append(slices.Clone(above), "allocator reserve"), append(slices.Clone(above), "allocator CR write")}
	chains = append(chains, agentStages(r.Stderr, append(above, "allocator "+agentCreateRPC)...)...)
	requireTrace(t, c, trace, parent, chains...)

	trace, parent = caller(t)
	cluster.OK(t, "fsb-ctl", "delete", name)
	requireTrace(t, c, trace, parent,
		[]string{"fsb-ctl fsb-ctl delete", "fsb-ctl " + deleteRPC, "allocator " + deleteRPC},
		[]string{"allocator " + deleteRPC, "agent " + agentDeleteRPC, "agent terminate"},
		[]string{"allocator " + deleteRPC, "agent " + agentDeleteRPC, "containerd containerd.services.*"})
}

// TestTraceOfStrongCreate follows a strong create: the custom resource carries the trace from the allocator to the controller.
func TestTraceOfStrongCreate(t *testing.T) {
	c := collect(t)
	trace, parent := caller(t)
	name := uniqueName("strong")
	r := cluster.Run(t, "", "fsb-ctl", "run", name, "--strong", "--image", cluster.Busybox, "--", "sleep", "60")
	require.Zero(t, r.Code, r.Stderr)
	customResource(t, name, running)
	above := []string{"fsb-ctl fsb-ctl run", "fsb-ctl " + createRPC, "allocator " + createRPC, "controller sandbox.create", "controller " + agentCreateRPC}
	requireTrace(t, c, trace, parent, agentStages(startPath(t, name), above...)...)

	trace, parent = caller(t)
	cluster.OK(t, "fsb-ctl", "delete", name)
	requireTrace(t, c, trace, parent,
		[]string{"fsb-ctl fsb-ctl delete", "fsb-ctl " + deleteRPC, "allocator " + deleteRPC},
		[]string{"allocator " + deleteRPC, "agent " + agentDeleteRPC, "agent terminate"})
}

// startPath returns how fsb-ctl run would report the path of a sandbox's start.
func startPath(t *testing.T, name string) string {
	t.Helper()
	return "(" + strings.ToLower(string(customResource(t, name, running).Status.StartPath)) + ")"
}

// rootsOf returns the spans whose parent is not in the trace.
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

// TestTraceOfExec follows a command from fsb-ctl to the environment of the process that it starts.
func TestTraceOfExec(t *testing.T) {
	name := uniqueName("exec-traced")
	create(t, sandboxes(t), kept(name))
	customResource(t, name, running)
	c := collect(t)
	trace, parent := caller(t)
	r := cluster.Run(t, "", "fsb-ctl", "exec", name, "--", "sh", "-c", "echo $TRACEPARENT")
	require.Zero(t, r.Code, r.Stderr)
	const rpc = "fastsandbox.process.v1.ProcessService/StartProcess"
	requireTrace(t, c, trace, parent, []string{"fsb-ctl fsb-ctl exec", "fsb-ctl " + rpc, "gateway " + rpc, "agent " + rpc, "agent process.start"})
	spans := c.of(trace)
	i := slices.IndexFunc(spans, func(s span) bool { return s.name == "process.start" })
	require.Equal(t, "00-"+trace+"-"+spans[i].id+"-01", strings.TrimSpace(r.Stdout))
}
