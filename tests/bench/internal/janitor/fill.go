package janitor

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/api/services/tasks/v1"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	"github.com/google/uuid"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/swarm"
)

const (
	namespace = "default"
	pool      = "bench"
	nodeName  = "bench-node"
	agentPort = 5758
	// perAgent is how many sandboxes an agent has, and perShim how many slots share a shim, as agents have it.
	perAgent, perShim = 40, 8
	// starters is how many containers are started at a time.
	starters = 4
	// runtimeName is the default runtime of agents.
	runtimeName = "io.containerd.runc.v2"
	// specType is what containerd calls an OCI spec.
	specType = "types.containerd.io/opencontainers/runtime-spec/1/Spec"
)

// sandbox is the i-th on the node: a slot that was claimed.
type sandbox struct {
	id, group string
	agent     *agentv1.AgentInfo
	record    *agentv1.SandboxRecord
}

func slotID(i int) string { return identity.SlotID(fmt.Sprintf("%020x", i+1)) }

// newSandbox returns the i-th sandbox, on one of the agents.
func newSandbox(i int, agents []*agentv1.AgentInfo) sandbox {
	agent := agents[i/perAgent]
	return sandbox{
		id: slotID(i), group: slotID(i / perShim * perShim), agent: agent,
		record: &agentv1.SandboxRecord{
			Fence:     &agentv1.Fence{SandboxUid: uuid.NewString(), Attempt: 1, AgentUid: agent.GetPodUid()},
			Namespace: namespace, Name: fmt.Sprintf("sbx-%05d", i), RequestId: uuid.NewString(), CreateTime: timestamppb.Now(),
			ConsistencyMode: sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST,
			Spec: &sandboxv1.SandboxSpec{
				Image: "docker.io/library/busybox:1.37", Pool: pool, Command: []string{"/busybox", "sleep", "2000000000"}, Ports: []int32{int32(8000 + i)},
				Env: map[string]string{"TENANT": "tenant-0123456789", "SESSION": "0123456789abcdef"},
			},
		},
	}
}

// fill adds sandboxes to the node, with their agents' Pods and their custom resources.
func (w *testbed) fill(ctx context.Context, from, to int) error {
	for i := len(w.agents); i*perAgent < to; i++ {
		info := &agentv1.AgentInfo{PodName: fmt.Sprintf("agent-%03d", i), Namespace: namespace, Pool: pool, NodeName: nodeName, PodIp: fmt.Sprintf("10.0.0.%d", i+1)}
		if err := w.api.Agent(ctx, info); err != nil {
			return err
		}
		w.agents = append(w.agents, info)
	}
	all := make([]sandbox, to)
	for i := from; i < to; i++ {
		all[i] = newSandbox(i, w.agents)
	}
	if err := apiserver.Each(ctx, to-from, func(ctx context.Context, i int) error {
		s := all[from+i]
		return w.api.Kube.Create(ctx, apiserver.Sandbox(s.agent, swarm.Running(s.record, s.agent.GetPodIp(), true), agentPort))
	}); err != nil {
		return fmt.Errorf("filling the API server: %w", err)
	}
	var g errgroup.Group
	g.SetLimit(starters)
	for first := from; first < to && ctx.Err() == nil; {
		next := min((first/perShim+1)*perShim, to)
		group := all[first:next]
		g.Go(func() error { // a shim is started by the first of its group
			for _, s := range group {
				if err := w.node.run(ctx, s); err != nil {
					return fmt.Errorf("starting container %s: %w", s.id, err)
				}
			}
			return nil
		})
		first = next
	}
	return g.Wait()
}

// run creates a sandbox in containerd as an agent does: it starts a slot and then claims it.
func (n *node) run(ctx context.Context, s sandbox) error {
	logs := n.path(filepath.Join("log", s.id))
	if err := os.Mkdir(logs, 0o700); err != nil {
		return err
	}
	output := filepath.Join(logs, ctrd.OutputFile)
	for path, content := range map[string]string{output: "", filepath.Join(logs, ctrd.OwnerFile): s.agent.GetPodUid()} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			return err
		}
	}
	options, err := n.options()
	if err != nil {
		return err
	}
	who := identity.Identity{AgentUID: s.agent.GetPodUid(), Pool: pool, State: identity.StateSlot}
	slot, err := encode(n.spec(s))
	if err != nil {
		return err
	}
	if _, err := n.client.ContainerService().Create(ctx, containers.Container{
		ID: s.id, Labels: who.Labels(), Snapshotter: ctrd.DefaultSnapshotter, SnapshotKey: s.id,
		Runtime: containers.RuntimeInfo{Name: runtimeName, Options: options}, Spec: slot,
	}); err != nil {
		return err
	}
	// The second path is the same file by another name, as agents have it.
	if _, err := n.client.TaskService().Create(ctx, &tasks.CreateTaskRequest{
		ContainerID: s.id, Stdout: output, Stderr: logs + "/./" + ctrd.OutputFile, Options: options,
	}); err != nil {
		return errgrpc.ToNative(err)
	}
	if _, err := n.client.TaskService().Start(ctx, &tasks.StartRequest{ContainerID: s.id}); err != nil {
		return errgrpc.ToNative(err)
	}
	return n.claim(ctx, s, who)
}

// options keep the OCI runtime's state in the workspace, and not in the directory that all containerds share.
func (n *node) options() (*anypb.Any, error) {
	raw, err := anypb.New(&runcoptions.Options{Root: n.path("runc")})
	if err != nil {
		return nil, fmt.Errorf("encoding runtime options: %w", err)
	}
	raw.TypeUrl = strings.TrimPrefix(raw.GetTypeUrl(), "type.googleapis.com/") // as containerd's registry of types has it
	return raw, nil
}

// claim makes the record that of a sandbox which was persisted, with a snapshot and a spec of a sandbox's size.
func (n *node) claim(ctx context.Context, s sandbox, who identity.Identity) error {
	if _, err := n.client.SnapshotService(ctrd.DefaultSnapshotter).Prepare(ctx, s.id, baseSnapshot); err != nil {
		return err
	}
	fence := s.record.GetFence()
	who.State, who.Namespace, who.Name, who.Persisted = identity.StateClaimed, s.record.GetNamespace(), s.record.GetName(), true
	who.SandboxUID, who.Attempt = fence.GetSandboxUid(), fence.GetAttempt()
	spec := n.spec(s)
	spec.Linux.Seccomp = seccomp.DefaultProfile(spec)
	raw, err := encode(spec)
	if err != nil {
		return err
	}
	record, err := anypb.New(s.record)
	if err != nil {
		return err
	}
	_, err = n.client.ContainerService().Update(ctx, containers.Container{
		ID: s.id, Labels: who.Labels(), Image: s.record.GetSpec().GetImage(), Spec: raw, Extensions: map[string]typeurl.Any{ctrd.RecordKey: record},
	}, "labels", "image", "spec", "extensions")
	return err
}

func encode(s *specs.Spec) (*anypb.Any, error) {
	raw, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("encoding an OCI spec: %w", err)
	}
	return &anypb.Any{TypeUrl: specType, Value: raw}, nil
}

// spec is the OCI spec of a sandbox that sleeps, in namespaces and a cgroup of its own.
func (n *node) spec(s sandbox) *specs.Spec {
	caps := []string{"CAP_KILL"}
	return &specs.Spec{
		Version: "1.0.2",
		Root:    &specs.Root{Path: n.path("rootfs"), Readonly: true},
		Process: &specs.Process{
			Args: s.record.GetSpec().GetCommand(), Env: []string{"PATH=/"}, Cwd: "/", NoNewPrivileges: true,
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps},
		},
		Hostname: "sandbox",
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=64k"}},
		},
		Annotations: map[string]string{ctrd.GroupAnnotation: s.group},
		Linux: &specs.Linux{
			CgroupsPath: filepath.Join(n.workspace.cgroup, "pod"+s.agent.GetPodUid(), ctrd.CgroupPrefix+s.id),
			Namespaces:  []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace}},
			Resources:   &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}},
		},
	}
}
