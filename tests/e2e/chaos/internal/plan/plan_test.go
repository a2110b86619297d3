package plan_test

import (
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/plan"
)

func options() plan.Options {
	return plan.Options{Seed: 1, Duration: 2 * time.Minute, Creates: 4, FaultEvery: 5 * time.Second, MinLife: time.Second, MaxLife: 20 * time.Second}
}

func TestSameSeedSamePlan(t *testing.T) {
	require.Equal(t, plan.New(options()), plan.New(options()))
	other := options()
	other.Seed = 2
	require.NotEqual(t, plan.New(options()).Lives[0].At, plan.New(other).Lives[0].At)
}

func TestFaultsAndLoadAreIndependent(t *testing.T) {
	calm := options()
	calm.FaultEvery = 0
	require.Empty(t, plan.New(calm).Faults)
	require.Equal(t, plan.New(options()).Lives, plan.New(calm).Lives)
}

// Each kind of fault and each kind of life occurs in the plan of CI.
func TestPlanCoversAllKinds(t *testing.T) {
	p := plan.New(options())
	require.InDelta(t, 480, len(p.Lives), 80)
	require.InDelta(t, 24, len(p.Faults), 6)
	kinds := map[plan.Kind]int{}
	for i, f := range p.Faults {
		kinds[f.Kind]++
		require.Less(t, f.At, 2*time.Minute)
		require.True(t, i == 0 || f.At-p.Faults[i-1].At >= 2500*time.Millisecond, "faults are too close to each other")
	}
	for _, k := range plan.Kinds() {
		require.GreaterOrEqual(t, kinds[k], 2, "%s", k)
	}
	seen := map[string]int{}
	names := map[string]int{}
	for i, l := range p.All() {
		require.Equal(t, i, l.Index, "numbers are in order")
		names[l.Name]++
		for what, is := range map[string]bool{
			"strong": l.Strong, "ttl": l.TTL > 0, "exits": l.Exit != nil, "twice": l.Twice, "overtake": l.Overtake > 0,
			"again": l.Again != nil, "kept": l.DeleteAfter == 0, "recreate": l.AutoRecreate,
		} {
			if is {
				seen[what]++
			}
		}
		for j, s := range l.Steps {
			seen[s.What]++
			require.True(t, j == 0 || s.After >= l.Steps[j-1].After)
		}
	}
	for _, what := range []string{"strong", "ttl", "exits", "twice", "overtake", "again", "kept", "recreate",
		plan.SetLabel, plan.MoveExpiry, plan.RemoveExpiry, plan.FlipPolicy, plan.Reset} {
		require.GreaterOrEqual(t, seen[what], 5, what)
	}
	for name, n := range names {
		require.LessOrEqual(t, n, 2, name)
	}
}

// TestLoadFitsTheMachine limits how many sandboxes a plan keeps at once.
func TestLoadFitsTheMachine(t *testing.T) {
	p := plan.New(options())
	for at := time.Duration(0); at < 2*time.Minute; at += time.Second {
		alive := 0
		for _, l := range p.All() {
			if l.At <= at && (l.DeleteAfter == 0 || at < l.At+l.DeleteAfter) {
				alive++
			}
		}
		require.LessOrEqual(t, alive, 70, "at %s", at)
	}
}

// README.md promises how the mesh reacts to exactly the faults that the harness injects.
func TestREADMENamesAllKinds(t *testing.T) {
	rows := map[plan.Kind]string{
		plan.KillAllocator:  "allocator",
		plan.StallAllocator: "allocator stopped for longer than its Lease, and resumed",
		plan.KillController: "controller",
		plan.KillAgent:      "agent's process",
		plan.KillAgentPod:   "agent's Pod or node",
		plan.KillJanitor:    "janitor",
		plan.KillGC:         "garbage collector",
		plan.KillGateway:    "gateway",
		plan.KillContainerd: "containerd",
		plan.KillShim:       "shim of a group of sandboxes",
		plan.KillAPIServer:  "API server",
		plan.CutNetwork:     "network between allocator and agent",
	}
	require.ElementsMatch(t, plan.Kinds(), slices.Collect(maps.Keys(rows)))
	raw, err := os.ReadFile("../../../../../README.md")
	require.NoError(t, err)
	_, table, found := strings.Cut(string(raw), "| what fails | what happens |\n|---|---|\n")
	require.True(t, found, "the table of faults")
	var documented []string
	for line := range strings.Lines(table) {
		cells := strings.Split(line, "|")
		if len(cells) < 3 {
			break
		}
		documented = append(documented, strings.TrimSpace(cells[1]))
	}
	require.ElementsMatch(t, slices.Collect(maps.Values(rows)), documented)
}
