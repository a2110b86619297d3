package render_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
)

func TestPoolSlots(t *testing.T) {
	for want, p := range map[string]*allocatorv1.Pool{
		"3/5   0-all": {FreeSlots: 3, WantedSlots: 5},
		"0/0   2-4":   {SlotsMin: proto.Int32(2), SlotsMax: proto.Int32(4)},
		"off   0-0":   {SlotsMax: proto.Int32(0)},
		"1/0   0-0":   {SlotsMax: proto.Int32(0), FreeSlots: 1}, // slots of before
	} {
		row := strings.Fields(strings.Split(written(t, render.Pools([]*allocatorv1.Pool{p}, false, true, now)), "\n")[1])
		require.Equal(t, strings.Fields(want), []string{row[6], row[12]})
	}
}

func TestPoolCapabilities(t *testing.T) {
	p := &allocatorv1.Pool{RuntimeHandler: "fsb", AddedCapabilities: []string{"NET_RAW", "MKNOD"}}
	require.Contains(t, written(t, render.Pools([]*allocatorv1.Pool{p, {RuntimeHandler: "runc"}}, false, true, now)), "fsb       NET_RAW,MKNOD\n")
}

func TestPoolCapacity(t *testing.T) {
	pools := []*allocatorv1.Pool{{Namespace: "ns", Name: "p", Agents: 2, ReadyAgents: 1, Capacity: 5, Allocated: 7, CreateTime: ago(time.Hour)}}
	require.Equal(t, strings.TrimPrefix(`
NAMESPACE   NAME   AGENTS   READY   CAPACITY   USED   FREE   SLOTS   AGE
ns          p      2        1       5          7      0      0/0     60m
`, "\n"), written(t, render.Pools(pools, true, false, now)), "the free capacity is never negative")
}

func TestAgents(t *testing.T) {
	agents := []*allocatorv1.Agent{
		{Info: &agentv1.AgentInfo{Namespace: "ns", PodName: "a", Pool: "p", NodeName: "n", Capacity: 5}, Ready: true, Allocated: 2, Apparmor: &agentv1.AppArmorStatus{Profile: "fast-sandbox-default-1"}, LastHeartbeatTime: ago(time.Second)},
		{Info: &agentv1.AgentInfo{Namespace: "ns", PodName: "b", Pool: "p"}, Reason: "Draining", SlotsOffReason: "no overlay", Apparmor: &agentv1.AppArmorStatus{OffReason: "no parser"}},
	}
	require.Equal(t, strings.TrimPrefix(`
NAMESPACE   NAME   POOL   NODE     READY   USED   CAPACITY   SLOTS   HEARTBEAT
ns          a      p      n        True    2      5          0/0     1s
ns          b      p      <none>   False   0      0          off     <unknown>
`, "\n"), written(t, render.Agents(agents, true, false, now)))
	wide := written(t, render.Agents(agents, false, true, now))
	require.Contains(t, wide, "Draining   no overlay         off: no parser\n")
	require.Contains(t, wide, "fast-sandbox-default-1\n")
}

func TestImages(t *testing.T) {
	images := []*allocatorv1.PoolImage{{Image: "i", Pinned: true, Nodes: []*allocatorv1.NodeImage{
		{NodeName: "n", AgentPod: "a", Present: true, State: agentv1.PinnedImageState_PINNED_IMAGE_STATE_PULLING}, {NodeName: "m"},
	}}, {Image: "j"}}
	require.Equal(t, "IMAGE   PINNED   NODES\ni       yes      1/2\nj       no       0/0\n", written(t, render.Images(images, false)))
	require.Contains(t, written(t, render.Images(images, true)), "i       yes      n      a        yes       Pulling   <none>\n")
}

func TestPullProgress(t *testing.T) {
	for want, p := range map[string]*agentv1.PullProgress{
		"":                 nil,
		"resolving":        {Phase: "resolving", DownloadedBytes: 1, TotalBytes: 2},
		"downloading":      {Phase: "downloading", DownloadedBytes: 1},
		"downloading 33%":  {Phase: "downloading", DownloadedBytes: 1, TotalBytes: 3},
		"downloading 100%": {Phase: "downloading", DownloadedBytes: 3, TotalBytes: 3},
		"done":             {Phase: "done", DownloadedBytes: 3, TotalBytes: 3},
	} {
		require.Equal(t, want, render.PullProgress(p))
	}
}
