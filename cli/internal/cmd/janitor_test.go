package cmd_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	gocmp "github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/cmd"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// twoNodes is a cluster with an orphan and a remnant on its second node.
func twoNodes() map[string]*janitor {
	return map[string]*janitor{
		"node-1": {verdicts: []*janitorv1.Verdict{kept("node-1", "u1-1"), slotOn("node-1", "slot.0f")}},
		"node-2": {verdicts: []*janitorv1.Verdict{orphan("node-2", "u2-1"), remnant("node-2", "u3-1")}},
	}
}

func TestJanitorVerdicts(t *testing.T) {
	b, n := withJanitors(t, twoNodes(), "node-1", "node-2")
	for name, tc := range map[string]struct{ args, want string }{
		"table": {"", `
NODE     KIND        CONTAINER   SANDBOX       ACTION   REASON          AGE
node-1   container   u1-1        default/web   Keep     Assigned        5m
node-1   slot        slot.0f     <none>        Keep     SlotOfAgent     5m
node-2   container   u2-1        default/web   Delete   SandboxAbsent   5m
node-2   snapshot    u3-1        <none>        Delete   Leftover        120m
`},
		"one node": {"--node node-1", `
NODE     KIND        CONTAINER   SANDBOX       ACTION   REASON        AGE
node-1   container   u1-1        default/web   Keep     Assigned      5m
node-1   slot        slot.0f     <none>        Keep     SlotOfAgent   5m
`},
		"wide": {"--node node-2 -o wide", `
NODE     KIND        CONTAINER   SANDBOX       ACTION   REASON          AGE    TASK      AGENT    RESOURCE   MISSING   FENCE    POOL      PERSISTED   DEFECT
node-2   container   u2-1        default/web   Delete   SandboxAbsent   5m     Running   Alive    Absent     42s       <none>   default   true        <none>
node-2   snapshot    u3-1        <none>        Delete   Leftover        120m   <none>    <none>   <none>     <none>    <none>   <none>    <none>      <none>
`},
		"names": {"-o name", "\ncontainer/u1-1\ncontainer/slot.0f\ncontainer/u2-1\ncontainer/u3-1\n"},
	} {
		t.Run(name, func(t *testing.T) {
			r := b.run(t, strings.Fields("janitor verdicts "+tc.args)...)
			require.Zero(t, r.code, r.err)
			require.Equal(t, strings.TrimPrefix(tc.want, "\n"), r.out)
			require.Empty(t, r.err)
		})
	}
	require.Equal(t, tunnel.Selector{Namespace: "fast-sandbox-janitor", Labels: "app.kubernetes.io/name=janitor"}, withoutNode(n.selectors[0]))

	r := b.run(t, "janitor", "verdicts", "--node", "node-2", "-o", "json", "--kubeconfig", "k", "--context", "c", "--janitor-namespace", "other")
	require.Zero(t, r.code, r.err)
	for _, part := range []string{`"verdicts": [`, `"reason": "REASON_SANDBOX_ABSENT"`, `"missing": "42s"`, `"state": "RESOURCE_STATE_ABSENT"`, `"kind": "REMNANT_KIND_SNAPSHOT"`} {
		require.Contains(t, r.out, part)
	}
	require.Equal(t, "k", n.options.Kubeconfig)
	require.Equal(t, "c", n.options.Context)
	require.Equal(t, tunnel.Selector{Namespace: "other", Labels: "app.kubernetes.io/name=janitor", Node: "node-2"}, n.selectors[len(n.selectors)-1])
	r = b.run(t, "janitor", "verdicts", "--node", "node-2", "-o", "yaml")
	require.Contains(t, r.out, "reason: REASON_SANDBOX_ABSENT")
}

func withoutNode(s tunnel.Selector) tunnel.Selector {
	s.Node = ""
	return s
}

func TestJanitorVerdictsSelects(t *testing.T) {
	j := &janitor{}
	b, _ := withJanitors(t, map[string]*janitor{"node-1": j}, "node-1")
	r := b.run(t, "janitor", "verdicts", "--action", "delete,Wait,DELETE", "--reason", "agent-pod-gone", "--reason", "LogRetained")
	require.Zero(t, r.code, r.err)
	require.Empty(t, r.out)
	require.Equal(t, "no verdicts found\n", r.err)
	require.Empty(t, gocmp.Diff([]*janitorv1.ListVerdictsRequest{{
		Actions: []janitorv1.Action{janitorv1.Action_ACTION_DELETE, janitorv1.Action_ACTION_WAIT},
		Reasons: []janitorv1.Reason{janitorv1.Reason_REASON_AGENT_POD_GONE, janitorv1.Reason_REASON_LOG_RETAINED},
	}}, j.lists, protocmp.Transform()))
	for args, want := range map[string]string{
		"verdicts --action kill":    `--action is "kill", want one of Keep, Wait, Delete`,
		"verdicts --reason because": `--reason is "because", want one of NotManaged, Assigned,`,
		"sweep --reason because":    `--reason is "because"`,
		"verdicts more":             "error: ",
		"tidy":                      `unknown command "tidy", want verdicts or sweep`,
	} {
		r := b.run(t, strings.Fields("janitor "+args)...)
		require.Equal(t, 2, r.code, args)
		require.Contains(t, r.err, want)
	}
}

func TestJanitorWatch(t *testing.T) {
	j := &janitor{err: fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd is away")}
	event := func(k janitorv1.WatchVerdictsResponse_Type, v *janitorv1.Verdict) {
		j.events = append(j.events, &janitorv1.WatchVerdictsResponse{Type: k, Verdict: v})
	}
	event(janitorv1.WatchVerdictsResponse_TYPE_VERDICT, kept("node-1", "u1-1"))
	event(janitorv1.WatchVerdictsResponse_TYPE_VERDICT, orphan("node-1", "a-longer-id-1"))
	event(janitorv1.WatchVerdictsResponse_TYPE_SYNCED, nil)
	event(janitorv1.WatchVerdictsResponse_TYPE_GONE, orphan("node-1", "a-longer-id-1"))
	b, n := withJanitors(t, map[string]*janitor{"node-1": j}, "node-1")
	r := b.run(t, "janitor", "verdicts", "-w")
	require.Equal(t, 7, r.code)
	require.Contains(t, r.err, "error: containerd is away (RUNTIME_UNAVAILABLE)")
	require.Equal(t, strings.TrimPrefix(`
EVENT     NODE     KIND        CONTAINER       SANDBOX       ACTION   REASON          AGE
VERDICT   node-1   container   u1-1            default/web   Keep     Assigned        5m
VERDICT   node-1   container   a-longer-id-1   default/web   Delete   SandboxAbsent   5m
GONE      node-1   container   a-longer-id-1   default/web   Delete   SandboxAbsent   5m
`, "\n"), r.out)

	r = b.run(t, "janitor", "verdicts", "-w", "-o", "json")
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	require.Len(t, lines, 4)
	require.Equal(t, `{"type":"TYPE_SYNCED"}`, lines[2])
	r = b.run(t, "janitor", "verdicts", "-w", "-o", "name")
	require.Equal(t, "container/u1-1\ncontainer/a-longer-id-1\ncontainer/a-longer-id-1\n", r.out)
	r = b.run(t, "janitor", "verdicts", "-w", "-o", "yaml")
	require.Equal(t, 4, strings.Count(r.out, "---\n"))

	n.names = []string{"node-1", "node-2"}
	r = b.run(t, "janitor", "verdicts", "-w")
	require.Equal(t, 2, r.code)
	require.Contains(t, r.err, "there are 2 janitors: --node is required")
}

// TestJanitorWatchIsInterrupted ends a watch by Ctrl-C.
func TestJanitorWatchIsInterrupted(t *testing.T) {
	j := &janitor{hold: true, events: []*janitorv1.WatchVerdictsResponse{{Type: janitorv1.WatchVerdictsResponse_TYPE_SYNCED}}}
	b, _ := withJanitors(t, map[string]*janitor{"node-1": j}, "node-1")
	ctx, interrupt := context.WithCancel(t.Context())
	var out buffer
	done := make(chan result, 1)
	go func() { done <- b.runTo(ctx, &out, "janitor", "verdicts", "-w", "-o", "json") }()
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "SYNCED") }, time.Minute, time.Millisecond)
	interrupt()
	r := <-done
	require.Zero(t, r.code, r.err)
	require.Empty(t, r.err)
}

func TestJanitorSweep(t *testing.T) {
	deleted, failed, would := janitorv1.SweepResponse_OUTCOME_DELETED, janitorv1.SweepResponse_OUTCOME_FAILED, janitorv1.SweepResponse_OUTCOME_WOULD_DELETE
	one, two := &janitor{}, &janitor{}
	b, _ := withJanitors(t, map[string]*janitor{"node-1": one, "node-2": two}, "node-1", "node-2")

	t.Run("nothing", func(t *testing.T) {
		r := b.run(t, "janitor", "sweep")
		require.Zero(t, r.code, r.err)
		require.Empty(t, r.out)
		require.Equal(t, "nothing to delete\n", r.err)
		r = b.run(t, "janitor", "sweep", "-o", "json")
		require.Equal(t, "{\n  \"results\": []\n}\n", r.out)
		require.Empty(t, r.err)
	})
	one.results = []*janitorv1.SweepResponse{swept(would, orphan("node-1", "u1-1"), "")}
	two.results = []*janitorv1.SweepResponse{swept(would, remnant("node-2", "u2-1"), "")}
	t.Run("dry run", func(t *testing.T) {
		one.sweeps = nil
		r := b.run(t, "janitor", "sweep", "--dry-run", "--reason", "sandbox-absent")
		require.Zero(t, r.code, r.err)
		require.Equal(t, strings.TrimPrefix(`
NODE     KIND        CONTAINER   SANDBOX       OUTCOME       REASON          MESSAGE
node-1   container   u1-1        default/web   WouldDelete   SandboxAbsent   <none>
node-2   snapshot    u2-1        <none>        WouldDelete   Leftover        <none>
`, "\n"), r.out)
		require.Empty(t, gocmp.Diff([]*janitorv1.SweepRequest{
			{DryRun: true, Reasons: []janitorv1.Reason{janitorv1.Reason_REASON_SANDBOX_ABSENT}}}, one.sweeps, protocmp.Transform()))
	})
	one.results = []*janitorv1.SweepResponse{
		swept(deleted, orphan("node-1", "u1-1"), ""), swept(failed, orphan("node-1", "u4-1"), "device or resource busy"),
	}
	two.results = []*janitorv1.SweepResponse{swept(deleted, remnant("node-2", "u2-1"), "")}
	t.Run("a failure", func(t *testing.T) {
		r := b.run(t, "janitor", "sweep")
		require.Equal(t, 1, r.code)
		require.Contains(t, r.out, "u4-1        default/web   Failed    SandboxAbsent   device or resource busy")
		require.Contains(t, r.err, "error: 1 of 3 could not be deleted (SWEEP_INCOMPLETE)\nhint: ")
		r = b.run(t, "janitor", "sweep", "-o", "name")
		require.Equal(t, "container/u1-1\ncontainer/u2-1\n", r.out)
		r = b.run(t, "janitor", "sweep", "-o", "json")
		require.Equal(t, 1, r.code)
		require.Contains(t, r.out, `"message": "device or resource busy"`)
	})
}

// TestJanitorSweepOfContainers names containers: each node is searched, and a container is missing if no node has it.
func TestJanitorSweepOfContainers(t *testing.T) {
	notFound := janitorv1.SweepResponse_OUTCOME_NOT_FOUND
	bare := func(node, id string) *janitorv1.Verdict { return &janitorv1.Verdict{NodeName: node, ContainerId: id} }
	b, _ := withJanitors(t, map[string]*janitor{
		"node-1": {results: []*janitorv1.SweepResponse{
			swept(janitorv1.SweepResponse_OUTCOME_KEPT, kept("node-1", "u1-1"), ""),
			swept(notFound, bare("node-1", "u2-1"), ""), swept(notFound, bare("node-1", "u3-1"), ""),
		}},
		"node-2": {results: []*janitorv1.SweepResponse{
			swept(janitorv1.SweepResponse_OUTCOME_DELETED, orphan("node-2", "u2-1"), ""),
			swept(notFound, bare("node-2", "u1-1"), ""), swept(notFound, bare("node-2", "u3-1"), ""),
		}},
	}, "node-1", "node-2")
	r := b.run(t, "janitor", "sweep", "u1-1", "u2-1", "u3-1", "u1-1")
	require.Equal(t, 3, r.code)
	require.Equal(t, strings.TrimPrefix(`
NODE     KIND        CONTAINER   SANDBOX       OUTCOME   REASON     MESSAGE
node-1   container   u1-1        default/web   Kept      Assigned   <none>
node-2   container   u2-1        default/web   Deleted   SandboxAbsent   <none>
<none>   <none>      u3-1        <none>        NotFound   <none>          <none>
`, "\n"), r.out)
	require.Contains(t, r.err, "error: no node has u3-1 (CONTAINER_NOT_FOUND)\nhint: fsb-ctl janitor verdicts")
}

func TestJanitorsThatCannotBeReached(t *testing.T) {
	byNode := twoNodes()
	b, n := withJanitors(t, byNode, "node-1", "node-2", "node-3")
	b.clock = clock.RealClock{}
	forbidden := fault.New(errdefs.ErrPermissionDenied, tunnel.ReasonCluster, "port-forwarding to Pod janitor-node-1: forbidden")
	n.refuse["node-1"], n.refuse["node-3"] = forbidden, forbidden
	r := b.run(t, "janitor", "verdicts")
	require.Equal(t, 9, r.code)
	require.Contains(t, r.out, "u2-1", "the other nodes are printed")
	require.Contains(t, r.err, "error: node node-3: port-forwarding")
	require.Contains(t, r.err, "error: node node-1: port-forwarding to Pod janitor-node-1: forbidden (CLUSTER_REFUSED)\nhint: the user of the kubeconfig must be allowed")

	clear(n.refuse)
	byNode["node-2"].err = fault.New(errdefs.ErrFailedPrecondition, fault.PhaseConflict, "not now")
	r = b.run(t, "janitor", "verdicts", "--node", "node-2")
	require.Equal(t, 5, r.code)
	require.Contains(t, r.err, "error: node node-2: not now (PHASE_CONFLICT)")

	n.portless = true
	r = b.run(t, "janitor", "verdicts", "--node", "node-2")
	require.Equal(t, 5, r.code)
	require.Contains(t, r.err, "Pod janitor-node-2 has no port named grpc (POD_UNREACHABLE)\nhint: kubectl get pods")

	r = b.run(t, "janitor", "verdicts", "--node", "node-9")
	require.Equal(t, 3, r.code)
	require.Contains(t, r.err, "error: no janitor runs on node node-9 (JANITOR_NOT_FOUND)\nhint: kubectl get pods -A -o wide -l app.kubernetes.io/name=janitor")
	n.names = nil
	r = b.run(t, "janitor", "sweep")
	require.Equal(t, 3, r.code)
	require.Contains(t, r.err, "error: no janitor runs in namespace fast-sandbox-janitor")

	n.err = away(tunnel.ReasonCluster)
	r = b.run(t, "janitor", "sweep", "--timeout", "50ms")
	require.Equal(t, 7, r.code)
	require.Contains(t, r.err, "error: it is away (CLUSTER_REFUSED)\nhint: check the cluster")
	b.cluster = func(tunnel.Options) (cmd.Cluster, error) {
		return nil, fault.New(errdefs.ErrFailedPrecondition, tunnel.ReasonNoCluster, "no configuration")
	}
	r = b.run(t, "janitor", "verdicts")
	require.Equal(t, 2, r.code)
	require.Contains(t, r.err, "error: no configuration (NO_CLUSTER)\nhint: select a cluster with --kubeconfig FILE")
}

// TestJanitorTunnelIsOpenedAgain breaks a tunnel before its first byte.
func TestJanitorTunnelIsOpenedAgain(t *testing.T) {
	b, n := withJanitors(t, twoNodes(), "node-1")
	b.clock = clock.RealClock{}
	n.broken = 1
	r := b.run(t, "janitor", "verdicts")
	require.Zero(t, r.code, r.err)
	require.Contains(t, r.out, "u1-1")
	require.Equal(t, 2, n.dials)
}

// TestJanitorsAreChecked connects to a server whose certificate is not that of a janitor.
func TestJanitorsAreChecked(t *testing.T) {
	b, n := withJanitors(t, twoNodes(), "node-1")
	n.addresses["node-1"] = b.addr // that of the allocator
	r := b.run(t, "janitor", "verdicts")
	require.Equal(t, 9, r.code)
	require.Contains(t, r.err, "error: node node-1: connecting to the janitor of node node-1: ")
	require.Contains(t, r.err, "CERTIFICATE_NOT_ACCEPTED")
}

func TestJanitorCompletion(t *testing.T) {
	b, _ := withJanitors(t, nil, "node-1", "node-2")
	r := b.run(t, "__complete", "janitor", "verdicts", "--node", "")
	require.Contains(t, r.out, "node-1\nnode-2\n")
	r = b.run(t, "__complete", "janitor", "sweep", "--reason", "")
	require.Contains(t, r.out, "AgentPodGone\n")
	r = b.run(t, "__complete", "janitor", "verdicts", "--action", "")
	require.Contains(t, r.out, "Keep\nWait\nDelete\n")
}
