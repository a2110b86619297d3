//go:build integration

package app_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	fsb "github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/app"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// message is a message that is forwarded undecoded.
type message struct{ raw []byte }

// uncoded forwards messages undecoded.
type uncoded struct{}

func (uncoded) Name() string { return "proto" }

func (uncoded) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.(*message).raw)}, nil
}

func (uncoded) Unmarshal(data mem.BufferSlice, v any) error {
	v.(*message).raw = data.Materialize()
	return nil
}

// gate is a proxy in front of containerd. While it has a reason, it refuses every change.
type gate struct {
	socket string
	to     *grpc.ClientConn
	reason atomic.Pointer[string]
}

func newGate(t *testing.T, w *testEnv) *gate {
	t.Helper()
	to, err := grpc.NewClient("unix:"+w.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(uncoded{}), grpc.MaxCallRecvMsgSize(64<<20)))
	require.NoError(t, err)
	g := &gate{socket: filepath.Join(w.Dir, "gate.sock"), to: to}
	l, err := net.Listen("unix", g.socket)
	require.NoError(t, err)
	server := grpc.NewServer(grpc.ForceServerCodecV2(uncoded{}), grpc.UnknownServiceHandler(g.pass), grpc.MaxRecvMsgSize(64<<20))
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		require.NoError(t, <-served)
		require.NoError(t, to.Close())
	})
	return g
}

// refuse sets the reason; empty for none.
func (g *gate) refuse(reason string) { g.reason.Store(&reason) }

func (g *gate) pass(_ any, in grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(in)
	if reason := g.reason.Load(); reason != nil && *reason != "" {
		switch path.Base(method) {
		case "Delete", "DeleteProcess", "Kill", "Remove", "Create", "Update", "Prepare", "Start":
			return status.Error(codes.Unknown, *reason)
		}
	}
	md, _ := metadata.FromIncomingContext(in.Context())
	ctx, cancel := context.WithCancel(metadata.NewOutgoingContext(in.Context(), md))
	defer cancel()
	out, err := g.to.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		return err
	}
	go func() {
		m := &message{}
		for in.RecvMsg(m) == nil && out.SendMsg(m) == nil {
			m = &message{}
		}
		_ = out.CloseSend()
	}()
	for {
		m := &message{}
		if err := out.RecvMsg(m); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := in.SendMsg(m); err != nil {
			return err
		}
	}
}

// freeAddress returns an address that nothing listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	return l.Addr().String()
}

// counted returns the sum of a metric over all labels.
func counted(t *testing.T, address, name string) float64 {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/metrics", nil)
	require.NoError(t, err)
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0 // it does not listen yet
	}
	defer resp.Body.Close()
	var sum float64
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		words := strings.Fields(lines.Text())
		if metric, _, _ := strings.Cut(lines.Text(), "{"); len(words) < 2 || (metric != name && words[0] != name) {
			continue
		}
		n, err := strconv.ParseFloat(words[len(words)-1], 64)
		require.NoError(t, err)
		sum += n
	}
	return sum
}

// fill mounts a small file system on a directory, and fills it on request.
func fill(t *testing.T, dir string) (all func()) {
	t.Helper()
	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m,nr_inodes=64,mode=0700"))
	t.Cleanup(func() { unmount(t, dir) })
	return func() {
		for i := 0; ; i++ {
			err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("full-%d", i)), nil, 0o600)
			if errors.Is(err, unix.ENOSPC) {
				return
			}
			require.NoError(t, err)
		}
	}
}

// TestFailedRemovalsAreRetried: containerd refuses changes, as with a read-only or full disk, and there is no space for a mark beside
// the log. It is logged and counted, running processes are not disturbed, and the removal succeeds once it can.
func TestFailedRemovalsAreRetried(t *testing.T) {
	w := newTestEnv(t)
	full := fill(t, w.LogRoot)
	alive, gone := w.pod("agent-alive"), w.pod("agent-gone")
	healthy, first, second := claimed("healthy", alive), claimed("first", gone), claimed("second", gone)
	written := w.sandbox(healthy)
	w.sandbox(first)
	w.sandbox(second)
	kept := w.container(healthy.ContainerID(), healthy.Labels(), verdict.Running)
	lost := []thing{w.container(first.ContainerID(), first.Labels(), verdict.Running), w.container(second.ContainerID(), second.Labels(), verdict.Stopped)}
	full()
	g := newGate(t, w)
	var metrics string
	j := w.start(func(c *app.Config) {
		metrics = freeAddress(t)
		c.ContainerdSocket, c.MetricsAddress, c.Policy.LogRetention, c.Policy.Grace = g.socket, metrics, time.Hour, time.Hour
	})
	require.Equal(t, janitorv1.Reason_REASON_ASSIGNED, j.verdicts(t)[lost[0].id])
	const failures = "fastsandbox_janitor_deletion_failures_total"
	for i, reason := range []string{"read-only file system", "no space left on device"} {
		before := counted(t, metrics, failures)
		g.refuse(reason)
		if i == 0 {
			w.deletePod("agent-gone")
		}
		require.Eventually(t, func() bool { return counted(t, metrics, failures) >= before+4 }, testkit.Timeout, testkit.Tick, "%s is not counted", reason)
		require.Eventually(t, func() bool { return w.logged("orphan not removed yet", reason) }, testkit.Timeout, testkit.Tick)
		scans := counted(t, metrics, "fastsandbox_janitor_scans_total")
		require.Eventually(t, func() bool { return counted(t, metrics, "fastsandbox_janitor_scans_total") > scans }, testkit.Timeout, testkit.Tick, "it continues to look")
		require.Equal(t, lost[0].pid, w.pid(lost[0].id))
		require.Equal(t, janitorv1.Reason_REASON_AGENT_POD_GONE, j.verdicts(t)[lost[0].id])
	}
	g.refuse("")
	require.Eventually(t, func() bool {
		left := w.left()
		return !left["container "+lost[0].id] && !left["container "+lost[1].id] && !left["snapshot "+lost[0].id] && !left["snapshot "+lost[1].id]
	}, testkit.Timeout, testkit.Tick)
	require.Eventually(t, func() bool { return counted(t, metrics, "fastsandbox_janitor_deletions_total") >= 2 }, testkit.Timeout, testkit.Tick)
	require.Positive(t, counted(t, metrics, "fastsandbox_janitor_unmarked_logs_total"))
	require.True(t, w.logged("marking the log of an orphan", "no space left on device"))
	require.Equal(t, kept.pid, w.pid(kept.id))
	w.replace(j, written, healthy)
	j.stop()
	w.sweepAway([]thing{kept}, lost)
}

// replace creates another, unassigned Sandbox with the name of a removed one after some time. The container of the first is
// removed for that, however long the grace period is.
func (w *testEnv) replace(j *janitor, written *v1alpha1.Sandbox, id fsb.Identity) {
	w.t.Helper()
	w.strip(written)
	require.Eventually(w.t, func() bool { return j.verdicts(w.t)[id.ContainerID()] == janitorv1.Reason_REASON_WITHIN_GRACE }, testkit.Timeout, testkit.Tick)
	other := id
	other.SandboxUID = uuid.NewString()
	began := time.Now()
	w.unassigned(other)
	require.Eventually(w.t, func() bool { return !w.left()["container "+id.ContainerID()] }, testkit.Timeout, testkit.Tick)
	w.t.Logf("another Sandbox had the name for %s when the container was gone", time.Since(began).Round(time.Millisecond))
	require.Eventually(w.t, func() bool { return w.logged("orphan removed", id.ContainerID(), "sandbox-replaced") }, testkit.Timeout, testkit.Tick)
}
