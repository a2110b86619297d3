package cmd_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// mesh returns a fake with two sandboxes, two pools and two agents.
func mesh() *fake {
	return &fake{
		get: func(_ context.Context, in *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
			return &sandboxv1.GetSandboxResponse{Sandbox: running(in.GetName())}, nil
		},
		list: func(_ context.Context, in *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error) {
			if in.GetNamespace() == "empty" {
				return &sandboxv1.ListSandboxesResponse{}, nil
			}
			if in.GetPageToken() == "" { // two pages
				return &sandboxv1.ListSandboxesResponse{Sandboxes: []*sandboxv1.Sandbox{running("web")}, NextPageToken: "next"}, nil
			}
			return &sandboxv1.ListSandboxesResponse{Sandboxes: []*sandboxv1.Sandbox{exited("a-longer-name", 7)}}, nil
		},
		pools: []*allocatorv1.Pool{{
			Namespace: "default", Name: "default", PoolMin: 1, PoolMax: 4, BufferMin: 2, BufferMax: 8, MaxSandboxesPerPod: 10,
			RuntimeHandler: "io.containerd.runc.v2", Agents: 2, ReadyAgents: 1, Capacity: 10, Allocated: 3, CreateTime: ago(2 * time.Hour),
			FreeSlots: 5, WantedSlots: 7,
		}, {
			Namespace: "default", Name: "off", RuntimeHandler: "runsc", CreateTime: ago(2 * time.Hour), SlotsMax: proto.Int32(0),
		}},
		agents: []*allocatorv1.Agent{{
			Info: &agentv1.AgentInfo{
				PodName: "agent-1", Namespace: "default", Pool: "default", NodeName: "node-1", Capacity: 10,
				RuntimeHandler: "io.containerd.runc.v2", Version: "v1",
			},
			Address: "10.0.0.3:5758", Allocated: 3, ImageCount: 5, Ready: true, LastHeartbeatTime: ago(time.Second),
			FreeSlots: 5, WantedSlots: 7,
		}, {
			Info: &agentv1.AgentInfo{PodName: "agent-2", Namespace: "default", Pool: "default"}, Reason: "Disconnected",
			SlotsOffReason: "the kernel has no fsopen",
		}},
	}
}

func TestOutputs(t *testing.T) {
	b := start(t, mesh())
	cases := map[string]struct{ args, want string }{
		"list": {"list", `
NAME            PHASE            POOL      AGENT     EXIT     AGE
web             Running          default   agent-1   <none>   5m
a-longer-name   Failed (Error)   default   agent-1   7        5m
`},
		"list wide of all namespaces": {"list -A -o wide", `
NAMESPACE   NAME            PHASE            POOL      AGENT     EXIT     AGE   NODE     IMAGE                            ENDPOINTS     START   UID
default     web             Running          default   agent-1   <none>   5m    node-1   docker.io/library/busybox:1.37   10.0.0.3:80   Slot    uid-web
default     a-longer-name   Failed (Error)   default   agent-1   7        5m    node-1   docker.io/library/busybox:1.37   10.0.0.3:80   Slot    uid-a-longer-name
`},
		"list names":     {"list -o name", "\nsandbox/web\nsandbox/a-longer-name\n"},
		"list of none":   {"list -n empty -o json", "\n{\n  \"sandboxes\": []\n}\n"},
		"list of none 2": {"list -n empty", "\n"},
		"get": {"get web", `
NAME   PHASE     POOL      AGENT     EXIT     AGE
web    Running   default   agent-1   <none>   5m
`},
		"get json": {"get web -o json", `
{
  "namespace": "default",
  "name": "web",
  "uid": "uid-web",
  "labels": {
    "k": "v"
  },
  "spec": {
    "image": "docker.io/library/busybox:1.37",
    "pool": "default",
    "command": [
      "sh",
      "-c",
      "sleep 1"
    ]
  },
  "status": {
    "phase": "PHASE_RUNNING",
    "assignedPod": "agent-1",
    "nodeName": "node-1",
    "sandboxId": "uid-web-1",
    "endpoints": [
      "10.0.0.3:80"
    ],
    "attempt": "1",
    "startPath": "START_PATH_SLOT"
  },
  "createTime": "2030-01-02T02:59:05Z"
}
`},
		"get yaml by the long name": {"sandbox get web -o yaml", `
createTime: "2030-01-02T02:59:05Z"
labels:
  k: v
name: web
namespace: default
spec:
  command:
  - sh
  - -c
  - sleep 1
  image: docker.io/library/busybox:1.37
  pool: default
status:
  assignedPod: agent-1
  attempt: "1"
  endpoints:
  - 10.0.0.3:80
  nodeName: node-1
  phase: PHASE_RUNNING
  sandboxId: uid-web-1
  startPath: START_PATH_SLOT
uid: uid-web
`},
		"get name": {"get web -o name", "\nsandbox/web\n"},
		"describe": {"describe web", `
Name:         web
Namespace:    default
UID:          uid-web
Labels:       k=v
Created:      2030-01-02T02:59:05Z (5m ago)
Phase:        Running
Image:        docker.io/library/busybox:1.37
Command:      sh -c "sleep 1"
Pool:         default
Agent:        agent-1
Node:         node-1
Container:    uid-web-1
Attempt:      1
Endpoints:    10.0.0.3:80
Persisted:    false
Start Path:   Slot
`},
		"pools": {"pool list", `
NAME      AGENTS   READY   CAPACITY   USED   FREE   SLOTS   AGE
default   2        1       10         3      7      5/7     120m
off       0        0       0          0      0      off     120m
`},
		"pool wide": {"pool get default -o wide", `
NAME      AGENTS   READY   CAPACITY   USED   FREE   SLOTS   AGE    MIN   MAX   BUFFER   PER-AGENT   SLOT-RANGE   RUNTIME                 ADDED-CAPABILITIES
default   2        1       10         3      7      5/7     120m   1     4     2-8      10          0-all        io.containerd.runc.v2   <none>
`},
		"pools wide": {"pool list -o wide", `
NAME      AGENTS   READY   CAPACITY   USED   FREE   SLOTS   AGE    MIN   MAX   BUFFER   PER-AGENT   SLOT-RANGE   RUNTIME                 ADDED-CAPABILITIES
default   2        1       10         3      7      5/7     120m   1     4     2-8      10          0-all        io.containerd.runc.v2   <none>
off       0        0       0          0      0      off     120m   0     0     0-0      0           0-0          runsc                   <none>
`},
		"pool name": {"pool list -o name", "\nsandboxpool/default\nsandboxpool/off\n"},
		"agents": {"agents", `
NAME      POOL      NODE     READY   USED   CAPACITY   SLOTS   HEARTBEAT
agent-1   default   node-1   True    3      10         5/7     1s
agent-2   default   <none>   False   0      0          off     <unknown>
`},
		"agents wide": {"agents -o wide", `
NAME      POOL      NODE     READY   USED   CAPACITY   SLOTS   HEARTBEAT   ADDRESS         RUNTIME                 IMAGES   VERSION   REASON         SLOTS-OFF-REASON           APPARMOR
agent-1   default   node-1   True    3      10         5/7     1s          10.0.0.3:5758   io.containerd.runc.v2   5        v1        <none>         <none>                     <none>
agent-2   default   <none>   False   0      0          off     <unknown>   <none>          <none>                  0        <none>    Disconnected   the kernel has no fsopen   <none>
`},
		"agents yaml": {"agents -o name", "\npod/agent-1\npod/agent-2\n"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			r := b.run(t, strings.Fields(c.args)...)
			require.Zero(t, r.code, r.err)
			require.Equal(t, strings.TrimPrefix(c.want, "\n"), r.out)
		})
	}
	r := b.run(t, "list", "-n", "empty")
	require.Equal(t, "no sandboxes found in namespace empty\n", r.err)
}

func TestVersion(t *testing.T) {
	b := start(t, &fake{})
	require.Contains(t, b.run(t, "version").out, "fsb-ctl v1.2.3")
	require.Contains(t, b.run(t, "version", "-o", "json").out, `"version": "v1.2.3"`)
	require.Equal(t, "v1.2.3\n", b.run(t, "--version").out)
}

func TestCompletion(t *testing.T) {
	b := start(t, mesh())
	require.Contains(t, b.run(t, "__complete", "get", "").out, "web\na-longer-name\n")
	require.NotContains(t, b.run(t, "__complete", "delete", "web", "").out, "web\n")
	require.Contains(t, b.run(t, "__complete", "run", "--pool", "").out, "default\n")
	require.Contains(t, b.run(t, "__complete", "list", "--phase", "").out, "Running\n")
	require.Contains(t, b.run(t, "__complete", "list", "-o", "").out, "yaml\n")
	require.Contains(t, b.run(t, "__complete", "image", "list", "--pool", "").out, "default\n")
	require.Contains(t, b.run(t, "__complete", "update", "web", "--failure-policy", "").out, "auto-recreate\n")
	require.Contains(t, b.run(t, "__complete", "trace", "").out, "web\n")
	require.Contains(t, b.run(t, "completion", "bash").out, "fsb-ctl")
}

// TestHelp checks that every command has a help text with an example.
func TestHelp(t *testing.T) {
	b := start(t, &fake{})
	for _, path := range []string{
		"", "run", "get", "list", "describe", "logs", "trace", "watch", "update", "delete", "pool", "pool list", "pool get", "agents",
		"image", "image list", "image pull", "janitor", "janitor verdicts", "janitor sweep", "gc", "gc explain", "gc preview", "gc graph",
		"gc watch", "gc status", "config", "config view", "version", "sandbox", "sandbox run",
	} {
		r := b.run(t, append(strings.Fields(path), "--help")...)
		require.Zero(t, r.code, path)
		require.Contains(t, r.out, "Usage:", path)
		require.Contains(t, r.out, "Examples:", path)
		require.Empty(t, r.err, path)
	}
	require.Contains(t, b.run(t, "--help").out, "  6   no capacity, over a quota or limit, or overloaded")
}
