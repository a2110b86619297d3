//go:build integration

package app_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	coordinationv1 "k8s.io/api/coordination/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/app"
)

// skewed is a clock that is wrong.
type skewed struct {
	clock.RealClock
	by time.Duration
}

func (s skewed) Now() time.Time                  { return s.RealClock.Now().Add(s.by) }
func (s skewed) Since(t time.Time) time.Duration { return s.Now().Sub(t) }

// holder is the leader's Pod by the Lease, or "".
func (c *cluster) holder() string {
	lease := &coordinationv1.Lease{}
	if err := c.admin.Get(context.Background(), client.ObjectKey{Namespace: ns, Name: "fast-sandbox-allocator"}, lease); err != nil {
		return ""
	}
	if lease.Spec.HolderIdentity == nil {
		return ""
	}
	pod, _, _ := strings.Cut(*lease.Spec.HolderIdentity, "_")
	return pod
}

// leaderOf returns the leader of two, and the other, once one is known to lead.
func (c *cluster) leaderOf(a, b *allocator) (leader, standby *allocator) {
	c.t.Helper()
	require.Eventually(c.t, func() bool { h := c.holder(); return h == a.name || h == b.name }, wait, tick)
	if c.holder() == a.name {
		return a, b
	}
	return b, a
}

// pair starts two allocators and waits until both answer.
func (c *cluster) pair(options ...app.Option) (leader, standby *allocator) {
	a, b := c.start(), c.start(options...)
	a.answers(c.t)
	b.answers(c.t)
	return c.leaderOf(a, b)
}

// answers waits until a replica has the first agent ready in its answer, from either replica.
func (a *allocator) answers(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		list, err := a.agents.ListAgents(ctx, &allocatorv1.ListAgentsRequest{Pool: pool})
		return err == nil && len(list.GetAgents()) == 1 && list.GetAgents()[0].GetReady()
	}, wait, tick)
}

// die ends a replica at once: what it had only in memory is lost, and the Lease stays.
func (a *allocator) die() {
	a.proxy.cut()
	a.stop()
}

func (c *cluster) gone(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		n := 0
		for _, a := range c.all() {
			n += len(a.Sandboxes()) + len(a.Tombstones())
		}
		return n == 0 && c.count() == 0
	}, wait, tick)
}

func remove(t *testing.T, a *allocator, name string) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := a.sandboxes.DeleteSandbox(context.Background(), &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: name})
		if status.Code(err) != codes.OK && status.Code(err) != codes.NotFound {
			t.Log(name, err)
			return false
		}
		return true
	}, wait, tick)
}

func TestTwoAllocators(t *testing.T) {
	c := newCluster(t)
	background(t, c.finalize)
	t.Run("calls reach the leader through either", func(t *testing.T) { c.t = t; forwarding(t, c) })
	t.Run("40 creates against a capacity of 3", func(t *testing.T) { c.t = t; overbooked(t, c) })
	t.Run("the leader dies with a sandbox unwritten", func(t *testing.T) { c.t = t; adoption(t, c) })
	t.Run("a leader that lost leadership without knowing it", func(t *testing.T) { c.t = t; superseded(t, c) })
	t.Run("the leader dies with a deletion that the API server does not know", func(t *testing.T) { c.t = t; deletion(t, c) })
	t.Run("clocks that differ by 30 s", func(t *testing.T) { c.t = t; skew(t, c) })
}

func forwarding(t *testing.T, c *cluster) {
	leader, standby := c.pair()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	watch, err := standby.sandboxes.WatchSandboxes(ctx, &sandboxv1.WatchSandboxesRequest{Namespace: ns})
	require.NoError(t, err)
	first, err := watch.Recv()
	require.NoError(t, err)
	require.Equal(t, sandboxv1.WatchSandboxesResponse_TYPE_SYNCED, first.GetType())
	resp, err := standby.sandboxes.CreateSandbox(ctx, create("through"))
	require.NoError(t, err)
	added, err := watch.Recv()
	require.NoError(t, err)
	require.Equal(t, resp.GetSandbox().GetUid(), added.GetSandbox().GetUid())
	for _, a := range []*allocator{leader, standby} {
		got, err := a.sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: ns, Name: "through"})
		require.NoError(t, err, "at once: both answer with the leader's word")
		require.Equal(t, resp.GetSandbox().GetUid(), got.GetSandbox().GetUid())
		logs, err := a.sandboxes.StreamLogs(ctx, &sandboxv1.StreamLogsRequest{Namespace: ns, Name: "through"})
		require.NoError(t, err)
		_, err = logs.Recv()
		require.NoError(t, err)
		_, err = a.agents.Allocate(ctx, &allocatorv1.AllocateRequest{Namespace: ns, Name: "x", SandboxUid: "x", Attempt: 1, Pool: pool, Image: "busybox"})
		require.Equal(t, codes.PermissionDenied, status.Code(err), "a client's role is checked where it calls")
	}
	_, err = standby.sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: "through"})
	require.NoError(t, err)
	c.gone(t)
	// An orderly end hands over at once.
	term := c.agent.Term(rpc.RoleAllocator)
	leader.stop()
	require.Eventually(t, func() bool {
		_, err := standby.sandboxes.CreateSandbox(ctx, create("after"))
		return err == nil
	}, wait, tick)
	require.Greater(t, c.agent.Term(rpc.RoleAllocator), term)
	remove(t, standby, "after")
	c.gone(t)
}

func overbooked(t *testing.T, c *cluster) {
	c.createPool("small")
	small := c.startAgent("agent-small", "small", "127.0.0.2", 3)
	leader, standby := c.pair()
	require.Eventually(t, func() bool {
		p, err := leader.agents.GetPool(context.Background(), &allocatorv1.GetPoolRequest{Namespace: ns, Name: "small"})
		return err == nil && p.GetPool().GetCapacity() == 3
	}, wait, tick)
	var mu sync.Mutex
	acked := map[string]bool{}
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			a := []*allocator{leader, standby}[i%2]
			req := create(fmt.Sprint("many-", i))
			req.Spec.Pool = "small"
			resp, err := a.sandboxes.CreateSandbox(context.Background(), req)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				acked[resp.GetSandbox().GetUid()] = true
				return
			}
			f := rpc.FromStatus(err)
			_, retry := fault.RetryAfter(f)
			if !errdefs.IsResourceExhausted(f) || !retry {
				t.Errorf("%s: %v", req.GetName(), err)
			}
		})
	}
	wg.Wait()
	require.Len(t, acked, 3)
	// The agent has no event for what does not start: the window is longer than an attempt that was still under way would take.
	require.Never(t, func() bool {
		for _, r := range small.Sandboxes() {
			if !acked[r.GetRecord().GetFence().GetSandboxUid()] {
				return true
			}
		}
		return len(small.Sandboxes()) != 3
	}, 2*time.Second, tick, "nothing of a failed call starts later")
	require.Eventually(t, func() bool { return c.count() == 3 }, wait, tick)
	list, err := leader.sandboxes.ListSandboxes(t.Context(), &sandboxv1.ListSandboxesRequest{Namespace: ns})
	require.NoError(t, err)
	for _, sb := range list.GetSandboxes() {
		remove(t, standby, sb.GetName())
	}
	c.gone(t)
}

func adoption(t *testing.T, c *cluster) {
	leader, standby := c.pair()
	leader.authorized(t)
	c.proxy.cut() // for all
	resp, err := leader.sandboxes.CreateSandbox(t.Context(), create("unwritten"))
	require.NoError(t, err)
	leader.die()
	require.Zero(t, c.count())
	c.proxy.mend()
	began := time.Now()
	sb := &v1alpha1.Sandbox{}
	require.Eventually(t, func() bool {
		return c.admin.Get(context.Background(), client.ObjectKey{Namespace: ns, Name: "unwritten"}, sb) == nil
	}, wait, tick)
	t.Log("adopted after", time.Since(began))
	require.Equal(t, resp.GetSandbox().GetUid(), sb.EffectiveUID())
	require.Equal(t, standby.name, c.holder())
	require.Eventually(t, func() bool {
		list := &eventsv1.EventList{}
		if c.admin.List(context.Background(), list, client.InNamespace(ns)) != nil {
			return false
		}
		for _, e := range list.Items {
			if e.Reason == "Adopted" && e.Regarding.Name == "unwritten" {
				return true
			}
		}
		return false
	}, wait, tick, "an Event is written")
	remove(t, standby, "unwritten")
	c.gone(t)
}

func superseded(t *testing.T, c *cluster) {
	leader, standby := c.pair()
	term := c.agent.Term(rpc.RoleAllocator)
	leader.authorized(t)
	leader.proxy.cut() // it alone cannot reach the API server, and leads on
	require.Eventually(t, func() bool { return c.agent.Term(rpc.RoleAllocator) > term }, wait, tick, "the other leads, and the agent knows")
	refused := c.agent.Superseded()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err := leader.sandboxes.CreateSandbox(ctx, create("stale"))
	require.Equal(t, fault.NotLeader, fault.ReasonOf(rpc.FromStatus(err)), "%v", err)
	require.Greater(t, c.agent.Superseded(), refused, "it was the agent who refused")
	require.Empty(t, c.agent.Sandboxes())
	_, err = standby.sandboxes.CreateSandbox(t.Context(), create("stale"))
	require.NoError(t, err, "its name is free")
	leader.proxy.mend()
	require.Eventually(t, func() bool { return leader.ended() }, wait, tick, "the former leader ends")
	remove(t, standby, "stale")
	c.gone(t)
}

func deletion(t *testing.T, c *cluster) {
	leader, standby := c.pair()
	_, err := leader.sandboxes.CreateSandbox(t.Context(), create("doomed"))
	require.NoError(t, err)
	require.Eventually(t, func() bool { s := c.agent.Sandboxes(); return len(s) == 1 && s[0].GetPersisted() }, wait, tick)
	leader.authorized(t)
	c.proxy.cut()
	_, err = leader.sandboxes.DeleteSandbox(t.Context(), &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: "doomed"})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return len(c.agent.Sandboxes()) == 0 }, wait, tick)
	require.Len(t, c.agent.Tombstones(), 1)
	require.Equal(t, 1, c.count())
	leader.die()
	c.proxy.mend()
	c.gone(t)
	require.Eventually(t, func() bool {
		_, err := standby.sandboxes.CreateSandbox(context.Background(), create("doomed"))
		return err == nil
	}, wait, tick, "the name is free")
	remove(t, standby, "doomed")
	c.gone(t)
}

func skew(t *testing.T, c *cluster) {
	leader, standby := c.pair(app.WithClock(skewed{by: 30 * time.Second}))
	names := []string{"skew-0", "skew-1", "skew-2"}
	for _, name := range names {
		_, err := standby.sandboxes.CreateSandbox(t.Context(), create(name))
		require.NoError(t, err)
	}
	// The window is longer than the Lease's duration.
	require.Never(t, func() bool { return c.holder() != leader.name }, 3*time.Second, tick, "no replica takes the Lease for old")
	leader.die()
	require.Eventually(t, func() bool { return c.holder() == standby.name }, wait, tick)
	running := func() map[string]agentv1.SandboxState {
		out := map[string]agentv1.SandboxState{}
		for _, r := range c.agent.Sandboxes() {
			out[r.GetRecord().GetName()] = r.GetState()
		}
		return out
	}
	require.Eventually(t, func() bool { return c.count() == len(names) }, wait, tick)
	// The window is longer than the orphan timeout.
	require.Never(t, func() bool { return len(running()) != len(names) }, 2*time.Second, tick, "no container is deleted for its age")
	for _, name := range names {
		remove(t, standby, name)
	}
	c.gone(t)
}
