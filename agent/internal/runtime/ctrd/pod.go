package ctrd

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Labels that containerd's CRI plugin puts on the containers of a Pod.
const (
	criPodUID    = "io.kubernetes.pod.uid"
	criContainer = "io.kubernetes.container.name"
	criKind      = "io.cri-containerd.kind"
	agentName    = "agent"
)

// pod is what containers share with the agent's Pod.
type pod struct {
	// netns is the path of the network namespace on the host; empty for the host's own.
	netns string
	// cgroupParent is a path (/kubepods/pod1) or, for systemd, a slice (kubepods-pod1.slice).
	cgroupParent string
	// shims is the cgroup of the shims, below the hierarchies' roots; empty for that of containerd.
	shims string
	// hosts and resolv are files on the host; empty for none.
	hosts, resolv string
}

// cgroup returns the cgroup of a container, in the form that the OCI runtime takes.
func (p *pod) cgroup(id string) string {
	if p.systemd() {
		return p.cgroupParent + ":" + strings.TrimSuffix(shared.CgroupPrefix, "-") + ":" + id
	}
	return path.Join("/", p.cgroupParent, shared.CgroupPrefix+id)
}

func (p *pod) systemd() bool {
	return strings.HasSuffix(p.cgroupParent, ".slice") && !strings.Contains(p.cgroupParent, "/")
}

// podFinder finds the agent's Pod.
type podFinder struct {
	client *client.Client
	config Config

	mu  sync.Mutex
	pod *pod // found once, does not change while the Pod lives
}

// find finds the agent's Pod through the containers that containerd's CRI plugin created for it: without the host's PID
// namespace there is no other way to learn the host's paths of the agent's own network namespace and cgroup.
func (f *podFinder) find(ctx context.Context) (*pod, error) {
	f.mu.Lock()
	p := f.pod
	f.mu.Unlock()
	if p != nil {
		return p, nil
	}
	p = &pod{}
	if f.config.PodUID != "" {
		if err := f.read(ctx, p); err != nil {
			return nil, err
		}
	}
	if f.config.NetNSPath != "" {
		p.netns = f.config.NetNSPath
	}
	if f.config.CgroupParent != "" {
		p.cgroupParent = f.config.CgroupParent
	}
	var err error
	if p.shims, err = makeShimCgroup(f.config.CgroupRoot, p); err != nil {
		return nil, err
	}
	f.mu.Lock()
	f.pod = p
	f.mu.Unlock()
	return p, nil
}

// makeShimCgroup makes a cgroup in that of the Pod for the shims, and returns its path; empty if it cannot have one. A shim copies the
// output of its containers, so that one that prints without end takes as much processor time as its Pod may have. Among the
// daemons of the node, where containerd is, it would take that of the other Pods. systemd does not permit such a cgroup in its slices.
func makeShimCgroup(root string, p *pod) (string, error) {
	if p.cgroupParent == "" || p.systemd() || root == "" {
		return "", nil
	}
	name := path.Join("/", p.cgroupParent, shared.ShimCgroup)
	dir := filepath.Join(root, "cpu", name) // of the legacy hierarchies only this one
	if cgroup.Unified() {
		dir = filepath.Join(root, name)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // as all cgroups
		return "", fmt.Errorf("making the cgroup of the shims: %w", err)
	}
	return name, nil
}

// read fills in what the containers of the Pod say.
func (f *podFinder) read(ctx context.Context, p *pod) error {
	list, err := f.client.ContainerService().List(ctx, fmt.Sprintf("labels.%q==%q", criPodUID, f.config.PodUID))
	if err != nil {
		return classify(err, "listing the containers of the agent's Pod")
	}
	var sandbox *specs.Spec
	for _, c := range list {
		switch {
		case c.Labels[criKind] == "sandbox":
			// After a restart of the Pod's sandbox the old one may still be listed; the one with a task counts.
			if spec := f.liveSandbox(ctx, c); spec != nil {
				sandbox = spec
			}
		case c.Labels[criContainer] == agentName:
			p.hosts, p.resolv = hostFiles(decodeSpec(c))
		}
	}
	if sandbox == nil {
		if f.config.NetNSPath != "" && f.config.CgroupParent != "" {
			return nil
		}
		return fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd has no running sandbox of the agent's Pod %s", f.config.PodUID)
	}
	p.netns = sandboxNetNS(sandbox)
	p.cgroupParent = cgroupParent(sandbox.Linux.CgroupsPath)
	return nil
}

// liveSandbox returns the spec of a Pod's sandbox if its task runs, otherwise nil. If the spec has no path of the network
// namespace, the task's is filled in.
func (f *podFinder) liveSandbox(ctx context.Context, c containers.Container) *specs.Spec {
	resp, err := f.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: c.ID})
	if errgrpc.ToNative(err) != nil {
		return nil
	}
	spec := decodeSpec(c)
	if spec == nil || spec.Linux == nil {
		return nil
	}
	for i, ns := range spec.Linux.Namespaces {
		if ns.Type == specs.NetworkNamespace && ns.Path == "" {
			spec.Linux.Namespaces[i].Path = fmt.Sprintf("/proc/%d/ns/net", resp.GetProcess().GetPid())
		}
	}
	return spec
}

// sandboxNetNS returns the path of the network namespace; empty for a Pod in the host's network, whose spec names none.
func sandboxNetNS(spec *specs.Spec) string {
	for _, ns := range spec.Linux.Namespaces {
		if ns.Type == specs.NetworkNamespace {
			return ns.Path
		}
	}
	return ""
}

// cgroupParent returns the Pod's cgroup, given the cgroup of its sandbox: `/kubepods/pod1/abc` -> `/kubepods/pod1`,
// `pod1.slice:cri-containerd:abc` -> `pod1.slice`.
func cgroupParent(sandbox string) string {
	if slice, _, ok := strings.Cut(sandbox, ":"); ok {
		return slice
	}
	if sandbox == "" {
		return ""
	}
	return path.Dir(sandbox)
}

// hostFiles returns the host's paths of the files that the kubelet mounted into the agent's container.
func hostFiles(spec *specs.Spec) (hosts, resolv string) {
	if spec == nil {
		return "", ""
	}
	for _, m := range spec.Mounts {
		switch m.Destination {
		case "/etc/hosts":
			hosts = m.Source
		case "/etc/resolv.conf":
			resolv = m.Source
		}
	}
	return hosts, resolv
}

func decodeSpec(c containers.Container) *specs.Spec {
	var s specs.Spec
	if c.Spec == nil || json.Unmarshal(c.Spec.GetValue(), &s) != nil {
		return nil
	}
	return &s
}

// oomScoreAdj returns a score at which the kernel kills a sandbox before its agent. It is never less than what the shim is
// likely to have, because lowering it needs a privilege that some hosts do not grant.
func oomScoreAdj() int {
	const least, most = 100, 1000
	own := 0
	if raw, err := os.ReadFile("/proc/self/oom_score_adj"); err == nil {
		if n, err := strconv.Atoi(strings.TrimSpace(string(raw))); err == nil {
			own = n
		}
	}
	return min(max(own+1, least), most)
}
