package desired_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

func TestMeasure(t *testing.T) {
	type usage = map[string]desired.Usage
	for _, tt := range []struct {
		name      string
		resources []desired.Resource
		reports   []desired.Report
		reserved  map[string]int
		draining  string
		load      desired.Load
		usage     usage
	}{
		{name: "empty", usage: usage{}},
		{
			name:      "known to the resource only",
			resources: []desired.Resource{{UID: "s", Agent: "a"}},
			load:      desired.Load{Active: 1}, usage: usage{"a": {Held: 1, Live: 1}},
		},
		{
			name:    "known to the agent only",
			reports: []desired.Report{{UID: "s", Agent: "a", Attempt: 1}},
			load:    desired.Load{Active: 1}, usage: usage{"a": {Held: 1, Live: 1}},
		},
		{
			name:      "known to both counts once",
			resources: []desired.Resource{{UID: "s", Agent: "a"}}, reports: []desired.Report{{UID: "s", Agent: "a", Attempt: 1}},
			load: desired.Load{Active: 1}, usage: usage{"a": {Held: 1, Live: 1}},
		},
		{
			name:      "a finished process uses no capacity",
			resources: []desired.Resource{{UID: "s", Agent: "a", Finished: true}, {UID: "t", Agent: "a"}},
			reports:   []desired.Report{{UID: "u", Agent: "a", Attempt: 1, Finished: true}},
			load:      desired.Load{Active: 1}, usage: usage{"a": {Held: 3, Finished: 2, Live: 1}},
		},
		{
			name:      "the report of a finished process comes before its resource",
			resources: []desired.Resource{{UID: "s", Agent: "a"}}, reports: []desired.Report{{UID: "s", Agent: "a", Attempt: 1, Finished: true}},
			usage: usage{"a": {Held: 1, Finished: 1}},
		},
		{
			name:      "a running container of another attempt uses capacity",
			resources: []desired.Resource{{UID: "s", Agent: "a", Finished: true}},
			reports:   []desired.Report{{UID: "s", Agent: "a", Attempt: 1, Finished: true}, {UID: "s", Agent: "a", Attempt: 2}},
			load:      desired.Load{Active: 1}, usage: usage{"a": {Held: 1, Live: 1}},
		},
		{
			name:      "deleted resources are no demand",
			resources: []desired.Resource{{UID: "s", Agent: "a", Deleting: true}, {UID: "t", Agent: "a", Deleting: true}, {UID: "u", Deleting: true}},
			usage:     usage{"a": {Held: 2}},
		},
		{
			name:      "a deleted sandbox uses capacity while its agent reports it",
			resources: []desired.Resource{{UID: "s", Agent: "a", Deleting: true, Ports: []int32{80}}}, reports: []desired.Report{{UID: "s", Agent: "a", Attempt: 1}},
			load: desired.Load{Active: 1}, usage: usage{"a": {Held: 1, Live: 1}},
		},
		{
			name:      "waiting",
			resources: []desired.Resource{{UID: "s", Waiting: true}, {UID: "t", Waiting: true}},
			load:      desired.Load{Pending: 2}, usage: usage{},
		},
		{
			name:      "a waiting sandbox with a reservation counts once",
			resources: []desired.Resource{{UID: "s", Waiting: true}}, reserved: map[string]int{"a": 1},
			load: desired.Load{Active: 1}, usage: usage{"a": {Reserved: 1}},
		},
		{
			name:      "a waiting sandbox that is reported already counts once",
			resources: []desired.Resource{{UID: "s", Waiting: true, Attempt: 1}}, reports: []desired.Report{{UID: "s", Agent: "a", Attempt: 2}},
			load: desired.Load{Active: 1}, usage: usage{"a": {Held: 1, Live: 1}},
		},
		{
			name:      "a container of an earlier attempt does not serve a waiting sandbox",
			resources: []desired.Resource{{UID: "s", Waiting: true, Attempt: 1}}, reports: []desired.Report{{UID: "s", Agent: "a", Attempt: 1}},
			load: desired.Load{Active: 1, Pending: 1}, usage: usage{"a": {Held: 1, Live: 1}},
		},
		{
			name:      "draining agents are no load",
			resources: []desired.Resource{{UID: "s", Agent: "a"}, {UID: "t", Agent: "b"}}, reserved: map[string]int{"a": 2}, draining: "a",
			load: desired.Load{Active: 1}, usage: usage{"a": {Held: 1, Live: 1, Reserved: 2}, "b": {Held: 1, Live: 1}},
		},
		{
			name: "ports of waiting and live sandboxes",
			resources: []desired.Resource{
				{UID: "s", Agent: "a", Ports: []int32{80}}, {UID: "t", Waiting: true, Ports: []int32{80, 81}},
				{UID: "finished", Agent: "a", Finished: true, Ports: []int32{80}}, {UID: "draining", Agent: "b", Ports: []int32{80}},
				{UID: "deleting", Agent: "a", Deleting: true, Ports: []int32{80}},
			},
			draining: "b", load: desired.Load{Active: 1, Pending: 1, PortDemand: 2},
			usage: usage{"a": {Held: 3, Live: 1, Finished: 1}, "b": {Held: 1, Live: 1}},
		},
		{
			name:      "no port demand without a waiting sandbox",
			resources: []desired.Resource{{UID: "s", Agent: "a", Ports: []int32{80}}, {UID: "t", Agent: "b", Ports: []int32{80}}},
			load:      desired.Load{Active: 2}, usage: usage{"a": {Held: 1, Live: 1}, "b": {Held: 1, Live: 1}},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			load, got := desired.Measure(tt.resources, tt.reports, tt.reserved, func(agent string) bool { return tt.draining != "" && agent == tt.draining })
			require.Equal(t, tt.load, load)
			require.Equal(t, tt.usage, got)
		})
	}
}

// TestControllerThatComesBackToDeletedSandboxes: one agent of five was enough, and many Sandboxes were deleted while no
// controller ran.
func TestControllerThatComesBackToDeletedSandboxes(t *testing.T) {
	var resources []desired.Resource
	for i := range 20 {
		resources = append(resources, desired.Resource{UID: string(rune('a' + i)), Agent: "agent", Deleting: true})
	}
	load, _ := desired.Measure(resources, nil, nil, func(string) bool { return false })
	require.Equal(t, 1, desired.Count(desired.Pool{PoolMin: 1, PoolMax: 4, BufferMin: 1, BufferMax: 5, PerAgent: 5}, load))
}

func TestUsageOfAnyInput(t *testing.T) {
	agent := rapid.SampledFrom([]string{"a", "b", "c"})
	uid := rapid.SampledFrom([]string{"s", "t", "u", "v"})
	rapid.Check(t, func(t *rapid.T) {
		var resources []desired.Resource
		for range rapid.IntRange(0, 6).Draw(t, "resources") {
			r := desired.Resource{UID: uid.Draw(t, "uid"), Finished: rapid.Bool().Draw(t, "finished"), Deleting: rapid.Bool().Draw(t, "deleting")}
			if rapid.Bool().Draw(t, "assigned") {
				r.Agent = agent.Draw(t, "agent")
			} else {
				r.Waiting = !r.Finished && !r.Deleting
			}
			resources = append(resources, r)
		}
		var reports []desired.Report
		for range rapid.IntRange(0, 6).Draw(t, "reports") {
			reports = append(reports, desired.Report{UID: uid.Draw(t, "uid"), Agent: agent.Draw(t, "agent"), Attempt: rapid.Int64Range(1, 3).Draw(t, "attempt"),
				Finished: rapid.Bool().Draw(t, "finished")})
		}
		reserved := map[string]int{}
		for _, a := range []string{"a", "b"} {
			reserved[a] = rapid.IntRange(0, 3).Draw(t, "reserved")
		}
		load, usage := desired.Measure(resources, reports, reserved, func(a string) bool { return a == "c" })
		active := 0
		for a, u := range usage {
			require.GreaterOrEqual(t, u.Held, u.Live+u.Finished)
			require.GreaterOrEqual(t, u.Used(), u.Live)
			if a != "c" {
				active += u.Used()
			}
		}
		require.Equal(t, active, load.Active)
		require.GreaterOrEqual(t, load.Pending, 0)
	})
}
