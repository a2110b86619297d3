package verdict_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

var update = flag.Bool("update", false, "write testdata/matrix.txt again")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const grace = 10 * time.Second

var policy = verdict.Policy{Grace: grace, LeftoverGrace: time.Minute, LogRetention: time.Hour} //nolint:gochecknoglobals // a constant

var (
	containers = []verdict.Container{verdict.Running, verdict.Stopped, verdict.Created, verdict.NoTask}                                                                   //nolint:gochecknoglobals // a constant
	agents     = []verdict.Agent{verdict.AgentAlive, verdict.AgentGone, verdict.AgentForeign, verdict.AgentUnknown}                                                       //nolint:gochecknoglobals // a constant
	there      = []verdict.ResourceState{verdict.ResourcePresent, verdict.ResourceTerminating, verdict.ResourceExpired}                                                   //nolint:gochecknoglobals // a constant
	fences     = []verdict.Fence{verdict.FenceMatch, verdict.FenceOtherSandbox, verdict.FenceOlder, verdict.FenceNewer, verdict.FenceOtherAgent, verdict.FenceUnreadable} //nolint:gochecknoglobals // a constant
)

// moment is a container's age and how long its custom resource has been missing. The second is what a clock that jumped shows, the
// third a custom resource that was just deleted.
type moment struct {
	name         string
	age, missing time.Duration
}

func moments() []moment {
	return []moment{{"young", grace - 1, grace - 1}, {"clock fell", -time.Hour, grace}, {"settling", grace, grace - 1}, {"ripe", grace, grace}}
}

// claimed is a container of attempt 3 of a sandbox.
func claimed(persisted bool) identity.Identity {
	return identity.Identity{Namespace: "ns", Name: "one", SandboxUID: "u", Attempt: 3, AgentUID: "a", Pool: "p", State: identity.StateClaimed, Persisted: persisted}
}

// resource returns a custom resource that compares with claimed as the fence says.
func resource(state verdict.ResourceState, f verdict.Fence) verdict.Resource {
	r := verdict.Resource{State: state, UID: "u", Attempt: 2, Assignment: &verdict.Assignment{AgentUID: "a", Attempt: 3}}
	switch f {
	case verdict.FenceOtherSandbox:
		r.UID = "v"
	case verdict.FenceOlder:
		r.Assignment.Attempt = 4
	case verdict.FenceNewer:
		r.Assignment.Attempt = 2
	case verdict.FenceOtherAgent:
		r.Assignment.AgentUID = "b"
	case verdict.FenceUnreadable:
		r.Assignment, r.Unreadable = nil, true
	}
	return r
}

// cell judges one observation of the matrix.
func cell(o verdict.Observation) string {
	v := verdict.Decide(o, policy)
	return v.Action.String() + " " + v.Reason.String()
}

type matrix struct {
	out   strings.Builder
	cells map[string]int
}

func (m *matrix) row(name string, list ...string) {
	line := fmt.Sprintf("  %-12s", name)
	for _, c := range list {
		m.cells[c]++
		line += fmt.Sprintf("  %-28s", c)
	}
	m.out.WriteString(strings.TrimRight(line, " ") + "\n")
}

func (m *matrix) group(title string, o verdict.Observation) {
	fmt.Fprintf(&m.out, "\n%s\n", title)
	for _, at := range moments() {
		o.Age, o.Missing = at.age, 0
		if o.Resource.State == verdict.ResourceAbsent {
			o.Missing = at.missing
		}
		var list []string
		for _, c := range containers {
			o.Container = c
			list = append(list, cell(o))
		}
		m.row(at.name, list...)
	}
}

func (m *matrix) claimed(agent verdict.Agent, persisted bool) {
	title := fmt.Sprintf("agent %s, %s, custom resource ", agent, map[bool]string{true: "persisted", false: "not persisted"}[persisted])
	o := verdict.Observation{ContainerID: "u-3", Managed: true, Identity: claimed(persisted), Agent: agent}
	for _, state := range []verdict.ResourceState{verdict.ResourceUnknown, verdict.ResourceAbsent} {
		o.Resource = verdict.Resource{State: state}
		m.group(title+state.String(), o)
	}
	for _, state := range there {
		for _, f := range fences {
			o.Resource = resource(state, f)
			m.group(title+state.String()+", "+f.String(), o)
		}
	}
}

// TestMatrix compares every cell with the reviewed table. `go test -update` writes the table again.
func TestMatrix(t *testing.T) {
	m := &matrix{cells: map[string]int{}}
	for _, agent := range agents {
		m.group(fmt.Sprintf("agent %s, slot", agent), verdict.Observation{
			ContainerID: "slot.1", Managed: true, Agent: agent, Identity: identity.Identity{AgentUID: "a", Pool: "p", State: identity.StateSlot},
		})
	}
	for _, agent := range agents {
		m.group(fmt.Sprintf("agent %s, labels that do not add up", agent), verdict.Observation{
			ContainerID: "u-3", Managed: true, Agent: agent, Identity: identity.Identity{AgentUID: "a"}, Defect: "attempt is missing",
		})
	}
	m.group("labels that do not add up and name no agent", verdict.Observation{ContainerID: "u-3", Managed: true, Defect: "agent-uid is missing"})
	m.group("not managed, agent gone", verdict.Observation{ContainerID: "u-3", Identity: claimed(true), Agent: verdict.AgentGone})
	for _, agent := range agents {
		for _, persisted := range []bool{true, false} {
			m.claimed(agent, persisted)
		}
	}
	got := m.head() + m.out.String()
	path := filepath.Join("testdata", "matrix.txt")
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(got), 0o600))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got)
}

func (m *matrix) head() string {
	var out strings.Builder
	out.WriteString(`The janitor's verdict on every kind of container, written by go test -update ./janitor/internal/verdict and reviewed by people.

Rows: how old the container is and, where its custom resource is absent, for how long that has been seen:
  young       both less than the grace
  clock fell  absent for the grace, but by the node's clock the container is not made yet
  settling    older than the grace, absent for less
  ripe        both the grace
Columns: what runs of the container: running, stopped (task ended), created (task never started), no-task (record alone).

How many cells have which verdict:
`)
	for _, r := range verdict.Reasons() {
		c := r.Action().String() + " " + r.String()
		if n := m.cells[c]; n > 0 {
			fmt.Fprintf(&out, "  %-30s %d\n", c, n)
		}
	}
	return out.String()
}

func TestCompareUnassignedResource(t *testing.T) {
	for attempt, want := range map[int64]verdict.Fence{2: verdict.FenceNewer, 3: verdict.FenceOlder, 4: verdict.FenceOlder} {
		require.Equal(t, want, verdict.Compare(claimed(true), verdict.Resource{State: verdict.ResourcePresent, UID: "u", Attempt: attempt}), attempt)
	}
	for _, f := range fences {
		require.Equal(t, f, verdict.Compare(claimed(true), resource(verdict.ResourcePresent, f)))
	}
}

func TestDecideRemnant(t *testing.T) {
	young, old := policy.LeftoverGrace-1, policy.LeftoverGrace
	fresh, stale := policy.LogRetention-1, policy.LogRetention
	log := func(agent verdict.Agent, deleted bool, age time.Duration) verdict.Remnant {
		return verdict.Remnant{ContainerID: "u-1", Kind: verdict.Log, Since: time.Hour, Agent: agent, Deleted: deleted, DeletedAge: age}
	}
	for _, c := range []struct {
		remnant verdict.Remnant
		want    verdict.Reason
	}{
		{verdict.Remnant{Kind: verdict.Snapshot, Since: young}, verdict.LeftoverYoung},
		{verdict.Remnant{Kind: verdict.Snapshot, Since: old}, verdict.Leftover},
		{verdict.Remnant{Kind: verdict.FIFOs, Since: young}, verdict.LeftoverYoung},
		{verdict.Remnant{Kind: verdict.FIFOs, Since: old}, verdict.Leftover},
		{verdict.Remnant{Kind: verdict.Mount, Since: young}, verdict.LeftoverYoung},
		{verdict.Remnant{Kind: verdict.Mount, Since: old}, verdict.Leftover},
		{verdict.Remnant{Kind: verdict.Cgroup, Since: young}, verdict.LeftoverYoung},
		{verdict.Remnant{Kind: verdict.Cgroup, Since: old}, verdict.Leftover},
		{verdict.Remnant{Kind: verdict.Bundle, Since: young}, verdict.LeftoverYoung},
		{verdict.Remnant{Kind: verdict.Bundle, Since: old}, verdict.Leftover},
		// No create can be in progress once the agent is gone.
		{verdict.Remnant{Kind: verdict.Snapshot, Agent: verdict.AgentGone}, verdict.Leftover},
		{verdict.Remnant{Kind: verdict.Cgroup, Agent: verdict.AgentGone}, verdict.Leftover},
		{verdict.Remnant{Kind: verdict.Bundle, Agent: verdict.AgentGone}, verdict.Leftover},
		{verdict.Remnant{Kind: verdict.Bundle, Agent: verdict.AgentAlive, Since: young}, verdict.LeftoverYoung},
		{verdict.Remnant{Kind: verdict.Bundle, Agent: verdict.AgentForeign, Since: young}, verdict.LeftoverYoung},
		{verdict.Remnant{Kind: verdict.Shim, Agent: verdict.AgentGone}, verdict.Leftover},
		{verdict.Remnant{Kind: verdict.Shim, Agent: verdict.AgentAlive, Since: old}, verdict.ShimOfAgent},
		{verdict.Remnant{Kind: verdict.Shim, Agent: verdict.AgentForeign, Since: old}, verdict.AnotherCluster},
		{verdict.Remnant{Kind: verdict.Shim, Since: old}, verdict.AgentPodUnknown},
		{log(verdict.AgentGone, false, fresh), verdict.LogRetained},
		{log(verdict.AgentGone, false, stale), verdict.Leftover},
		{log(verdict.AgentAlive, false, stale), verdict.LogOfAgent},
		{log(verdict.AgentForeign, false, stale), verdict.AnotherCluster},
		{log(verdict.AgentUnknown, false, stale), verdict.AgentPodUnknown},
		{log(verdict.AgentAlive, true, fresh), verdict.LogRetained},
		{log(verdict.AgentAlive, true, stale), verdict.Leftover},
		{log(verdict.AgentUnknown, true, stale), verdict.Leftover},
	} {
		got := verdict.DecideRemnant(c.remnant, policy)
		require.Equal(t, verdict.Verdict{Action: c.want.Action(), Reason: c.want}, got, "%+v", c.remnant)
	}
}

func TestWords(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range verdict.Reasons() {
		require.False(t, seen[r.String()], r.String())
		require.Regexp(t, `^[a-z]+(-[a-z]+)*$`, r.String())
		seen[r.String()] = true
	}
	require.Equal(t, "unknown", verdict.Reason(200).String())
	require.Equal(t, verdict.Keep, verdict.Reason(200).Action())
	require.Equal(t, []string{"keep", "wait", "delete", "invalid"}, []string{verdict.Keep.String(), verdict.Wait.String(), verdict.Delete.String(), verdict.Action(9).String()})
}
