package plan_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/podgc/plan"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func at(seconds int) time.Time { return time.Unix(1_700_000_000+int64(seconds), 0) }

func named(deletions []plan.Deletion) []string {
	var out []string
	for _, d := range deletions {
		out = append(out, d.Pod.Name+" "+string(d.Reason))
	}
	return out
}

func TestDeletions(t *testing.T) {
	finished := func(name string, created int) plan.Pod {
		return plan.Pod{Namespace: "ns", Name: name, UID: name, Node: "n", Phase: plan.PhaseSucceeded, Created: at(created)}
	}
	evicted := func(name string, created int) plan.Pod {
		return plan.Pod{Namespace: "ns", Name: name, UID: name, Node: "n", Phase: plan.PhaseFailed, StatusReason: plan.ReasonEvicted, Created: at(created)}
	}
	running := func(name, node string) plan.Pod {
		return plan.Pod{Namespace: "ns", Name: name, UID: name, Node: node, Phase: "Running"}
	}
	terminating := func(name, node string) plan.Pod {
		p := running(name, node)
		p.Terminating = true
		return p
	}
	n := plan.Node{Name: "n", Ready: true}
	for name, test := range map[string]struct {
		given plan.Observation
		want  []string
	}{
		"nothing": {},
		"a threshold of 0 keeps all": {
			given: plan.Observation{Pods: []plan.Pod{finished("a", 1), finished("b", 2)}, Nodes: []plan.Node{n}},
		},
		"as many as are kept": {
			given: plan.Observation{Threshold: 2, Pods: []plan.Pod{finished("a", 1), finished("b", 2)}, Nodes: []plan.Node{n}},
		},
		"the oldest go": {
			given: plan.Observation{Threshold: 1, Pods: []plan.Pod{finished("c", 3), finished("a", 1), finished("b", 2)}, Nodes: []plan.Node{n}},
			want:  []string{"a terminated", "b terminated"},
		},
		"evicted ones go before older ones": {
			given: plan.Observation{Threshold: 2, Pods: []plan.Pod{finished("a", 1), evicted("x", 9), finished("b", 2)}, Nodes: []plan.Node{n}},
			want:  []string{"x terminated"},
		},
		"of one age, the name decides": {
			given: plan.Observation{Threshold: 1, Pods: []plan.Pod{finished("b", 1), finished("a", 1)}, Nodes: []plan.Node{n}},
			want:  []string{"a terminated"},
		},
		"what is not finished counts for nothing": {
			given: plan.Observation{Threshold: 1, Pods: []plan.Pod{finished("a", 1), running("r", "n"), {Name: "u", UID: "u", Phase: "Unknown"}, {Name: "p", UID: "p", Phase: "Pending"}}, Nodes: []plan.Node{n}},
		},
		"terminating on a node out of service": {
			given: plan.Observation{Pods: []plan.Pod{terminating("a", "n"), running("r", "n")}, Nodes: []plan.Node{{Name: "n", OutOfService: true}}},
			want:  []string{"a out-of-service"},
		},
		"a node that is ready is in service, whatever its taint says": {
			given: plan.Observation{Pods: []plan.Pod{terminating("a", "n")}, Nodes: []plan.Node{{Name: "n", OutOfService: true, Ready: true}}},
		},
		"a node that is not ready may come back": {
			given: plan.Observation{Pods: []plan.Pod{terminating("a", "n")}, Nodes: []plan.Node{{Name: "n"}}},
		},
		"Pods of a node that is gone": {
			given: plan.Observation{Pods: []plan.Pod{running("a", "gone"), terminating("b", "gone"), running("c", "unknown"), running("d", "")}, Nodes: []plan.Node{n}, Gone: []string{"gone"}},
			want:  []string{"a orphaned", "b orphaned"},
		},
		"a node that is back": {
			given: plan.Observation{Pods: []plan.Pod{running("a", "n")}, Nodes: []plan.Node{n}, Gone: []string{"n"}},
		},
		"terminating without a node": {
			given: plan.Observation{Pods: []plan.Pod{terminating("a", ""), running("b", "")}},
			want:  []string{"a unscheduled"},
		},
		"each Pod once, for the first reason": {
			given: plan.Observation{Threshold: 1, Pods: []plan.Pod{finished("a", 1), finished("b", 2), terminating("u", ""), terminating("o", "gone"), terminating("s", "oos")},
				Nodes: []plan.Node{{Name: "oos", OutOfService: true}}, Gone: []string{"n", "gone"}},
			want: []string{"a terminated", "s out-of-service", "o orphaned", "b orphaned", "u unscheduled"},
		},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, test.want, named(plan.Deletions(test.given))) })
	}
}

func TestFinishedPodIsNotFailed(t *testing.T) {
	for phase, want := range map[string]bool{"Running": true, "Pending": true, "Unknown": true, "": true, plan.PhaseFailed: false, plan.PhaseSucceeded: false} {
		got := plan.Deletions(plan.Observation{Gone: []string{"gone"}, Pods: []plan.Pod{
			{Name: "o", UID: "o", Node: "gone", Phase: phase}, {Name: "u", UID: "u", Phase: phase, Terminating: true}}})
		require.Len(t, got, 2)
		require.Equal(t, want, got[0].Fail, phase)
		require.Equal(t, want, got[0].Disrupted, phase)
		require.Equal(t, want, got[1].Fail, phase)
		require.False(t, got[1].Disrupted, "only Pods that lost their node are disrupted")
	}
}

func podGen(i int) *rapid.Generator[plan.Pod] {
	return rapid.Custom(func(t *rapid.T) plan.Pod {
		return plan.Pod{
			Namespace: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "ns"), Name: rapid.SampledFrom([]string{"x", "y", "z"}).Draw(t, "name"), UID: fmt.Sprint("uid-", i),
			Node:         rapid.SampledFrom([]string{"", "n1", "n2", "n3", "n4"}).Draw(t, "node"),
			Phase:        rapid.SampledFrom([]string{"Pending", "Running", "Unknown", plan.PhaseFailed, plan.PhaseSucceeded}).Draw(t, "phase"),
			StatusReason: rapid.SampledFrom([]string{"", plan.ReasonEvicted}).Draw(t, "reason"),
			Created:      at(rapid.IntRange(0, 5).Draw(t, "created")), Terminating: rapid.Bool().Draw(t, "terminating"),
		}
	})
}

func observationGen(t *rapid.T) plan.Observation {
	o := plan.Observation{Threshold: rapid.IntRange(-1, 5).Draw(t, "threshold")}
	for i := range rapid.IntRange(0, 12).Draw(t, "pods") {
		o.Pods = append(o.Pods, podGen(i).Draw(t, "pod"))
	}
	for _, name := range []string{"n1", "n2", "n3", "n4"} {
		if rapid.Bool().Draw(t, "exists") {
			o.Nodes = append(o.Nodes, plan.Node{Name: name, Ready: rapid.Bool().Draw(t, "ready"), OutOfService: rapid.Bool().Draw(t, "out of service")})
		}
		if rapid.Bool().Draw(t, "gone") {
			o.Gone = append(o.Gone, name)
		}
	}
	return o
}

// TestDeletionsFollowTheRules states each rule of the seed in a second way.
func TestDeletionsFollowTheRules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := observationGen(t)
		got := plan.Deletions(o)
		deleted := map[string]plan.Deletion{}
		for _, d := range got {
			require.NotContains(t, deleted, d.Pod.UID, "twice")
			deleted[d.Pod.UID] = d
			require.Contains(t, o.Pods, d.Pod)
			require.Equal(t, d.Pod.Phase != plan.PhaseFailed && d.Pod.Phase != plan.PhaseSucceeded, d.Fail)
			require.Equal(t, d.Fail && d.Reason == plan.Orphaned, d.Disrupted)
		}
		finished, given := 0, 0
		for _, p := range o.Pods {
			i := slices.IndexFunc(o.Nodes, func(n plan.Node) bool { return n.Name == p.Node })
			oos := i >= 0 && !o.Nodes[i].Ready && o.Nodes[i].OutOfService && p.Terminating
			orphan := p.Node != "" && i < 0 && slices.Contains(o.Gone, p.Node)
			unscheduled := p.Node == "" && p.Terminating
			d, goes := deleted[p.UID]
			if p.Finished() {
				finished++
			}
			if goes && d.Reason == plan.Terminated {
				given++
				require.True(t, p.Finished())
				continue
			}
			require.Equal(t, oos || orphan || unscheduled, goes, "%+v", p)
			want := map[bool]plan.Reason{oos: plan.OutOfService, orphan: plan.Orphaned, unscheduled: plan.Unscheduled}[true]
			require.Equal(t, want, d.Reason)
		}
		if o.Threshold <= 0 {
			require.Zero(t, given)
		} else {
			require.Equal(t, max(0, finished-o.Threshold), given)
		}
		for _, kept := range o.Pods {
			for _, d := range got {
				if _, goes := deleted[kept.UID]; kept.Finished() && d.Reason == plan.Terminated && (!goes || deleted[kept.UID].Reason != plan.Terminated) {
					requireBefore(t, d.Pod, kept)
				}
			}
		}
	})
}

func requireBefore(t *rapid.T, first, second plan.Pod) {
	evicted := func(p plan.Pod) bool { return p.Phase == plan.PhaseFailed && p.StatusReason == plan.ReasonEvicted }
	if evicted(first) != evicted(second) {
		require.True(t, evicted(first))
		return
	}
	if !first.Created.Equal(second.Created) {
		require.True(t, first.Created.Before(second.Created))
		return
	}
	require.LessOrEqual(t, first.Name, second.Name)
}

func TestDeletionsDoNotDependOnOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := observationGen(t)
		shuffled := o
		shuffled.Pods = rapid.Permutation(o.Pods).Draw(t, "pods in another order")
		shuffled.Nodes = rapid.Permutation(o.Nodes).Draw(t, "nodes in another order")
		require.Equal(t, plan.Deletions(o), plan.Deletions(shuffled))
	})
}

func TestQuarantine(t *testing.T) {
	pods := []plan.Pod{{Name: "a", Node: "n"}, {Name: "b", Node: "known"}, {Name: "c"}}
	nodes := []plan.Node{{Name: "known"}}
	q := plan.NewQuarantine(40 * time.Second)
	require.Empty(t, q.Due(at(0), pods, nodes))
	require.Equal(t, 1, q.Waiting())
	require.Empty(t, q.Due(at(20), pods, nodes))
	require.Equal(t, []string{"n"}, q.Due(at(40), pods, nodes))
	require.Equal(t, []string{"n"}, q.Due(at(60), pods, nodes), "no answer yet: due again")
	q.Exists("n")
	require.Empty(t, q.Due(at(80), pods, nodes), "it exists: the quarantine restarts")
	require.Empty(t, q.Due(at(100), pods, nodes))
	require.Empty(t, q.Due(at(110), pods, append(nodes, plan.Node{Name: "n"})), "it is known")
	require.Zero(t, q.Waiting())
	require.Empty(t, q.Due(at(130), pods, nodes))
	require.Empty(t, q.Due(at(150), nil, nodes), "no Pod names it")
	require.Zero(t, q.Waiting())
	require.Equal(t, []string{"n"}, plan.NewQuarantine(0).Due(at(0), pods, nodes))
}

// TestQuarantineIsUninterrupted: a node is due if and only if it was unknown in every round of the whole period.
func TestQuarantineIsUninterrupted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const period = 4
		q := plan.NewQuarantine(period * time.Second)
		pods := []plan.Pod{{Name: "a", Node: "n"}, {Name: "b", Node: "m"}}
		since := map[string]int{}
		for now := range rapid.IntRange(1, 30).Draw(t, "rounds") {
			var nodes []plan.Node
			var want []string
			for _, name := range []string{"m", "n"} {
				if rapid.IntRange(0, 4).Draw(t, "known") == 0 {
					nodes = append(nodes, plan.Node{Name: name})
					delete(since, name)
					continue
				}
				if _, ok := since[name]; !ok {
					since[name] = now
				}
				if now-since[name] >= period {
					want = append(want, name)
				}
			}
			require.Equal(t, want, q.Due(at(now), pods, nodes))
			if len(want) > 0 && rapid.Bool().Draw(t, "it exists") {
				q.Exists(want[0])
				delete(since, want[0])
			}
		}
	})
}
