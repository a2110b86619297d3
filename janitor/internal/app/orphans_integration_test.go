//go:build integration

package app_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/sandbox"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/anypb"
	eventsv1 "k8s.io/api/events/v1"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	fsb "github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/app"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// healthy puts containers on the node that must not be removed, and returns their ids.
func (w *testEnv) healthy(agent string) []thing {
	running := claimed("running", agent)
	w.sandbox(running)
	stopped := claimed("stopped", agent)
	w.sandbox(stopped)
	terminating := claimed("terminating", agent)
	require.NoError(w.t, w.admin.Delete(w.t.Context(), w.sandbox(terminating)))
	unpersisted := claimed("unpersisted", agent)
	unpersisted.Persisted = false
	ahead := claimed("ahead", agent)
	w.sandbox(ahead)
	ahead.Attempt = 2
	// An agent of another cluster whose kubelet runs on this node.
	const foreign = "16fd2706-8baf-433b-82eb-8c7fada847da"
	theirs := claimed("theirs", foreign)
	unmanaged := claimed("unmanaged", uuid.NewString()).Labels()
	delete(unmanaged, fsb.KeyManaged)
	broken := claimed("broken", agent).Labels()
	broken[fsb.KeyAttempt] = "one"
	slot := fsb.Identity{AgentUID: agent, Pool: "p", State: fsb.StateSlot}
	return []thing{
		w.container(running.ContainerID(), running.Labels(), verdict.Running),
		w.container(stopped.ContainerID(), stopped.Labels(), verdict.Stopped),
		w.container(terminating.ContainerID(), terminating.Labels(), verdict.Running),
		w.container(unpersisted.ContainerID(), unpersisted.Labels(), verdict.Running),
		w.container(ahead.ContainerID(), ahead.Labels(), verdict.Created),
		w.container("the-agent-of-another-"+uuid.NewString(), map[string]string{"io.kubernetes.pod.uid": foreign, "io.cri-containerd.kind": "sandbox"}, verdict.Running),
		w.container(theirs.ContainerID(), theirs.Labels(), verdict.Running),
		w.container(uuid.NewString()+"-1", unmanaged, verdict.Running),
		w.container(broken[fsb.KeySandboxUID]+"-1", broken, verdict.Running),
		w.container(slotID(1), slot.Labels(), verdict.Running),
	}
}

// orphans puts containers on the node that are orphans once the caller deletes the Pod "gone", and as the loss of Sandboxes leaves
// them.
func (w *testEnv) orphans(alive, gone string) []thing {
	absent, replaced, over := claimed("absent", alive), claimed("replaced", alive), claimed("over", alive)
	w.strip(w.sandbox(absent))
	w.sandbox(claimed("replaced", alive))
	later := over
	later.Attempt = 2
	w.sandbox(later)
	elsewhere := claimed("elsewhere", alive)
	other := elsewhere
	other.AgentUID = "another-agent"
	w.sandbox(other)
	whole, unpersisted := claimed("whole", gone), claimed("unpersisted-of-gone", gone)
	w.sandbox(whole)
	unpersisted.Persisted = false
	broken := claimed("broken-of-gone", gone).Labels()
	delete(broken, fsb.KeySandboxName)
	slot := fsb.Identity{AgentUID: gone, Pool: "p", State: fsb.StateSlot}
	stopped, created, bare := claimed("stopped-of-gone", gone), claimed("created-of-gone", gone), claimed("bare-of-gone", gone)
	for _, id := range []fsb.Identity{stopped, created, bare} {
		w.sandbox(id)
	}
	return []thing{
		w.container(absent.ContainerID(), absent.Labels(), verdict.Running),
		w.container(replaced.ContainerID(), replaced.Labels(), verdict.Running),
		w.container(over.ContainerID(), over.Labels(), verdict.Stopped),
		w.container(elsewhere.ContainerID(), elsewhere.Labels(), verdict.Running),
		w.container(whole.ContainerID(), whole.Labels(), verdict.Running),
		w.container(unpersisted.ContainerID(), unpersisted.Labels(), verdict.Running),
		w.container(broken[fsb.KeySandboxUID]+"-1", broken, verdict.Running),
		w.container(slotID(2), slot.Labels(), verdict.Running),
		w.container(stopped.ContainerID(), stopped.Labels(), verdict.Stopped),
		w.container(created.ContainerID(), created.Labels(), verdict.Created),
		w.container(bare.ContainerID(), bare.Labels(), verdict.NoTask),
	}
}

// requireOnly waits until only these containers are left, with everything that belongs to them, unchanged.
func (w *testEnv) requireOnly(kept, gone []thing) {
	w.t.Helper()
	require.Eventually(w.t, func() bool {
		left := w.left()
		for _, g := range gone {
			for _, what := range []string{"container ", "snapshot ", "fifos ", "mount ", "cgroup ", "log ", "bundle "} {
				if left[what+g.id] {
					return false
				}
			}
		}
		return true
	}, testkit.Timeout, testkit.Tick, "%v of %v", w.left(), gone)
	left := w.left()
	for _, k := range kept {
		require.Equal(w.t, k.pid, w.pid(k.id), "%s never blinked", k.id)
		require.True(w.t, left["container "+k.id], k.id)
		require.FileExists(w.t, filepath.Join(w.LogRoot, k.id, ctrd.OutputFile))
		if fsb.IsContainerID(k.id) {
			require.True(w.t, left["snapshot "+k.id], k.id)
			require.True(w.t, left["fifos "+k.id], k.id)
		}
	}
}

// sweepAway removes what is left at the end of a test.
func (w *testEnv) sweepAway(things ...[]thing) {
	var g errgroup.Group
	g.SetLimit(4)
	for _, x := range slices.Concat(things...) {
		g.Go(func() error {
			return errors.Join(w.remover().Remove(w.t.Context(), x.id), os.RemoveAll(filepath.Join(w.LogRoot, x.id)))
		})
	}
	require.NoError(w.t, g.Wait())
}

func TestOnlyOrphansAreRemoved(t *testing.T) {
	w := newTestEnv(t)
	alive, gone := w.pod("agent-alive"), w.pod("agent-gone")
	kept := w.healthy(alive)
	lost := w.orphans(alive, gone)
	j := w.start(func(c *app.Config) { c.ScanInterval = time.Minute }) // changes are observed by events
	require.Equal(t, janitorv1.Reason_REASON_ASSIGNED, j.verdicts(t)[kept[0].id])
	w.requireOnly(kept, lost[:4])
	for _, x := range lost[4:] {
		require.True(t, w.left()["container "+x.id], "its agent lives: %s", x.id)
	}
	w.deletePod("agent-gone")
	began := time.Now()
	w.requireOnly(kept, lost)
	t.Logf("the node was clean of %d containers %s after the agent's Pod had gone", len(lost[4:]), time.Since(began).Round(time.Millisecond))
	got := j.verdicts(t)
	for i, want := range []janitorv1.Reason{
		janitorv1.Reason_REASON_ASSIGNED, janitorv1.Reason_REASON_ASSIGNED, janitorv1.Reason_REASON_SANDBOX_TERMINATING,
		janitorv1.Reason_REASON_NOT_PERSISTED, janitorv1.Reason_REASON_CREATE_IN_FLIGHT, janitorv1.Reason_REASON_UNSPECIFIED,
		janitorv1.Reason_REASON_ANOTHER_CLUSTER, janitorv1.Reason_REASON_UNSPECIFIED, janitorv1.Reason_REASON_UNIDENTIFIED, janitorv1.Reason_REASON_SLOT_OF_AGENT,
	} {
		require.Equal(t, want, got[kept[i].id], "%d %s", i, kept[i].id)
	}
	w.requireEvents("Sandbox whole", "Node "+node)
	j.stop()
	w.sweepAway(kept)
}

// requireEvents waits for Events on objects.
func (w *testEnv) requireEvents(want ...string) {
	w.t.Helper()
	require.Eventually(w.t, func() bool {
		var list eventsv1.EventList
		require.NoError(w.t, w.admin.List(w.t.Context(), &list))
		got := map[string]bool{}
		for _, e := range list.Items {
			if e.ReportingController == "fast-sandbox-janitor" && e.Reason == "OrphanRemoved" {
				got[e.Regarding.Kind+" "+e.Regarding.Name] = true
			}
		}
		for _, x := range want {
			if !got[x] {
				return false
			}
		}
		return true
	}, testkit.Timeout, testkit.Tick, "%v", want)
}

// TestRemnantsWithoutAContainer are found by their names; those of others, and of a living agent, are kept.
func TestRemnantsWithoutAContainer(t *testing.T) {
	w := newTestEnv(t)
	alive, gone := w.pod("agent-alive"), w.pod("agent-gone")
	id := func() string { return uuid.NewString() + "-1" }
	snapshot, fifo, mount, cgroup, log, bundle, young := id(), id(), id(), id(), id(), id(), id()
	w.snapshot(snapshot)
	w.fifo(fifo)
	mounted := w.mount(mount)
	dir := w.cgroup(cgroup)
	w.bundle(bundle, gone)
	w.bundle(young, alive)
	w.log(log, gone)
	half := filepath.Join(w.LogRoot, ctrd.NewLogPrefix+gone+"-"+id())
	require.NoError(t, os.Mkdir(half, 0o700))
	slot := slotID(7)
	w.snapshot(slot)
	// A task whose record was deleted: it still runs, in its cgroup.
	lost := claimed("lost", alive)
	task := w.container(lost.ContainerID(), lost.Labels(), verdict.Running)
	require.NoError(t, w.Client.ContainerService().Delete(t.Context(), task.id))
	require.NoError(t, os.RemoveAll(filepath.Join(w.LogRoot, task.id)))
	// Kept: a log of an agent that is about to create the container, and snapshots, FIFOs, mounts and cgroups of others.
	pulling := w.log(id(), alive)
	w.snapshot("another")
	other := w.fifo("another")
	otherMount, otherCgroup := w.mount("another"), w.cgroup("another")
	j := w.start(nil)
	w.deletePod("agent-gone")
	w.requireOnly(nil, []thing{{id: snapshot}, {id: fifo}, {id: mount}, {id: cgroup}, {id: log}, {id: slot}, {id: bundle}, {id: young}, task})
	require.Eventually(t, func() bool { return !lives(task.pid) }, testkit.Timeout, testkit.Tick)
	require.Eventually(t, func() bool { _, err := os.Stat(half); return errors.Is(err, os.ErrNotExist) }, testkit.Timeout, testkit.Tick)
	require.NoDirExists(t, dir)
	require.NoDirExists(t, filepath.Dir(mounted), "the bundle of the mount")
	for _, path := range []string{pulling, other, otherMount, otherCgroup} {
		_, err := os.Stat(path)
		require.NoError(t, err)
	}
	_, err := w.Client.SnapshotService(ctrd.DefaultSnapshotter).Stat(t.Context(), "another")
	require.NoError(t, err)
	want := map[string]janitorv1.Reason{filepath.Base(pulling) + " REMNANT_KIND_LOG": janitorv1.Reason_REASON_LOG_OF_AGENT}
	require.Eventually(t, func() bool { return maps.Equal(want, j.verdicts(t)) }, testkit.Timeout, testkit.Tick, "%v", j.verdicts(t))
	j.stop()
	require.NoError(t, w.Client.SnapshotService(ctrd.DefaultSnapshotter).Remove(t.Context(), "another"))
	unmount(t, otherMount)
	require.NoError(t, os.Remove(otherCgroup))
	require.NoError(t, os.RemoveAll(pulling))
}

// TestIdleShimsOfAGoneAgentAreRemoved, with their anchors and their records; not those of an agent that lives, and not one with a container.
func TestIdleShimsOfAGoneAgentAreRemoved(t *testing.T) {
	w := newTestEnv(t)
	alive, gone := w.pod("agent-alive"), w.pod("agent-gone")
	shim := func(name, agent string, anchored bool) string {
		id, labels := fsb.ShimID(name), map[string]string{fsb.KeyShim: agent}
		record := sandbox.Sandbox{ID: id, Labels: labels, Runtime: sandbox.RuntimeOpts{Name: "io.containerd.runc.v2"}}
		_, err := w.Client.SandboxStore().Create(t.Context(), record)
		require.NoError(t, err)
		if anchored {
			_, err = w.Client.ContainerService().Create(t.Context(), containers.Container{
				ID: id, Labels: labels, Runtime: containers.RuntimeInfo{Name: "io.containerd.runc.v2"}, Spec: &anypb.Any{TypeUrl: "spec", Value: []byte("{}")},
			})
			require.NoError(t, err)
		}
		return id
	}
	own, used := shim("own", alive, true), shim("used", gone, true)
	lost := []string{shim("lost", gone, true), shim("half", gone, false)}
	_, err := w.Client.ContainerService().Create(t.Context(), containers.Container{
		ID: "member", SandboxID: used, Runtime: containers.RuntimeInfo{Name: "io.containerd.runc.v2"}, Spec: &anypb.Any{TypeUrl: "spec", Value: []byte("{}")},
	})
	require.NoError(t, err)
	has := func(id string) bool {
		_, err := w.Client.SandboxStore().Get(t.Context(), id)
		_, anchor := w.Client.ContainerService().Get(t.Context(), id)
		return err == nil || anchor == nil
	}
	j := w.start(nil)
	name := func(id string) string { return id + " REMNANT_KIND_SHIM" }
	require.Eventually(t, func() bool { return j.verdicts(t)[name(lost[1])] == janitorv1.Reason_REASON_SHIM_OF_AGENT }, testkit.Timeout, testkit.Tick)
	require.True(t, has(lost[0]) && has(lost[1]), "its agent lives")
	w.deletePod("agent-gone")
	require.Eventually(t, func() bool { return !has(lost[0]) && !has(lost[1]) }, testkit.Timeout, testkit.Tick)
	require.True(t, has(own))
	require.True(t, has(used), "a container is in it")
	require.Equal(t, map[string]janitorv1.Reason{name(own): janitorv1.Reason_REASON_SHIM_OF_AGENT}, j.verdicts(t))
	require.NoError(t, w.Client.ContainerService().Delete(t.Context(), "member"))
	require.Eventually(t, func() bool { return !has(used) }, testkit.Timeout, testkit.Tick)
	j.stop()
	require.NoError(t, ctrd.RemoveAnchor(t.Context(), w.Client, own))
}

// TestRetainedLogIsRemovedInTime, and a dry run removes nothing.
func TestRetainedLogIsRemovedInTime(t *testing.T) {
	w := newTestEnv(t)
	alive := w.pod("agent-alive")
	absent := claimed("absent", alive)
	x := w.container(absent.ContainerID(), absent.Labels(), verdict.Running)
	j := w.start(func(c *app.Config) { c.Policy.Grace, c.Policy.LogRetention = 3*time.Second, 4*time.Second })
	require.Eventually(t, func() bool { return j.verdicts(t)[x.id] == janitorv1.Reason_REASON_WITHIN_GRACE }, testkit.Timeout, testkit.Tick)
	for _, r := range j.sweep(t, &janitorv1.SweepRequest{DryRun: true, ContainerIds: []string{x.id}}) {
		require.Contains(t, []janitorv1.SweepResponse_Outcome{janitorv1.SweepResponse_OUTCOME_KEPT, janitorv1.SweepResponse_OUTCOME_WOULD_DELETE}, r.GetOutcome())
	}
	require.Eventually(t, func() bool { return !w.left()["container "+x.id] }, testkit.Timeout, testkit.Tick)
	require.FileExists(t, filepath.Join(w.LogRoot, x.id, ctrd.OutputFile))
	require.Eventually(t, func() bool {
		return j.verdicts(t)[x.id+" REMNANT_KIND_LOG"] == janitorv1.Reason_REASON_LOG_RETAINED
	}, testkit.Timeout, testkit.Tick)
	w.requireOnly(nil, []thing{x})
	require.Equal(t, janitorv1.SweepResponse_OUTCOME_NOT_FOUND, j.sweep(t, &janitorv1.SweepRequest{ContainerIds: []string{x.id}})[0].GetOutcome())
}

// lives reports whether a process exists and is no zombie.
func lives(pid uint32) bool {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !bytes.Contains(raw, []byte(") Z "))
}

func (j *janitor) sweep(t *testing.T, req *janitorv1.SweepRequest) []*janitorv1.SweepResponse {
	t.Helper()
	stream, err := j.Sweep(t.Context(), req)
	require.NoError(t, err)
	var out []*janitorv1.SweepResponse
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return out
		}
		require.NoError(t, err)
		out = append(out, m)
	}
}
