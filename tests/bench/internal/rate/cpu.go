package rate

import (
	"context"
	"fmt"
	"maps"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/host"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
)

// Parts of the CPU time. The first ones are the mesh's, and the node's for raw containers.
const (
	Agents     = "agents, and what runs in sandboxes and containers"
	Allocator  = "allocators"
	OtherPods  = "other Pods"
	Containerd = "containerd"
	Shims      = "shims, runc, and other programs that containerd starts"
	Etcd       = "etcd"
	APIServer  = "kube-apiserver"
	Kubernetes = "kubelet and the rest of Kubernetes"
	Client     = "this benchmark"
)

// ofMesh are the parts that a create and a delete are charged with.
func ofMesh() []string { return []string{Agents, Allocator, OtherPods, Containerd, Shims} }

// parts are all of them.
func parts() []string { return append(ofMesh(), Etcd, APIServer, Kubernetes, Client) }

// The cgroups of the local cluster, and the program that all of its Kubernetes is (deploy/local).
const (
	clusterCgroup = "/fsb-local"
	systemCgroup  = clusterCgroup + "/system"
	podsCgroup    = clusterCgroup + "/kubepods"
	kubernetes    = "fsb-local"
)

// Usage is the CPU seconds of each part in a time.
type Usage struct {
	Wall  time.Duration
	Parts map[string]float64
}

// Add adds another time's.
func (u Usage) Add(v Usage) Usage {
	out := Usage{Wall: u.Wall + v.Wall, Parts: map[string]float64{}}
	for _, x := range []map[string]float64{u.Parts, v.Parts} {
		for part, seconds := range x {
			out.Parts[part] += seconds
		}
	}
	return out
}

// Each is the milliseconds of each part for each of n, without what the same time takes when nothing happens.
func (u Usage) Each(n int, idle Usage) map[string]float64 {
	out := map[string]float64{}
	for part, seconds := range u.Parts {
		if n > 0 && idle.Wall > 0 {
			out[part] = (seconds - idle.Parts[part]*u.Wall.Seconds()/idle.Wall.Seconds()) * 1000 / float64(n)
		}
	}
	return out
}

// meter reads the CPU time of the cluster. The total is that of its cgroup, because most of what a container costs is used by programs
// that end at once: the kernel keeps their time in the cgroup, and no reading of /proc would find them. What is known by its process
// or by a cgroup of its own is a part, and Shims is the rest.
type meter struct {
	cgroups   host.Cgroups
	processes map[int]string    // part by process
	pods      map[string]string // part by cgroup
}

// newMeter finds the cluster's processes and Pods, which must not change after this.
func newMeter(ctx context.Context, m *mesh.Mesh) (*meter, error) {
	c := &meter{processes: map[int]string{}, pods: map[string]string{}}
	var err error
	if c.cgroups, err = host.FindCgroups(); err != nil {
		return nil, err
	}
	members, err := c.cgroups.Members(systemCgroup)
	if err != nil {
		return nil, err
	}
	for _, pid := range members {
		if part := componentOf(host.Program(pid)); part != "" {
			c.processes[pid] = part
		}
	}
	if err := c.check(); err != nil {
		return nil, err
	}
	var pods corev1.PodList
	if err := m.Kube.List(ctx, &pods); err != nil {
		return nil, fmt.Errorf("listing Pods: %w", err)
	}
	cgroups, err := c.cgroups.Pods(podsCgroup)
	if err != nil {
		return nil, err
	}
	for i := range pods.Items {
		if path := cgroups[string(pods.Items[i].UID)]; path != "" {
			c.pods[path] = podPart(&pods.Items[i])
		}
	}
	return c, nil
}

// check returns an error unless all components were found whose time must be known.
func (c *meter) check() error {
	found := map[string]int{}
	for _, part := range c.processes {
		found[part]++
	}
	for part, want := range map[string]int{Containerd: 1, Etcd: 1, APIServer: 1} {
		if found[part] != want {
			return fmt.Errorf("%d processes in cgroup %s are %s, want %d: is this the local cluster?", found[part], systemCgroup, part, want)
		}
	}
	return nil
}

// componentOf is the part of a process of the cluster; empty for one that belongs to the rest.
func componentOf(program string, args []string) string {
	switch {
	case program == Containerd:
		return Containerd
	case program != kubernetes || len(args) == 0:
		return ""
	case args[0] == Etcd || args[0] == APIServer:
		return args[0]
	}
	return Kubernetes
}

// podPart is the part of a Pod.
func podPart(p *corev1.Pod) string {
	switch {
	case p.Labels[v1alpha1.LabelPool] != "":
		return Agents
	case p.Labels["app.kubernetes.io/name"] == "allocator":
		return Allocator
	}
	return OtherPods
}

// reading is the CPU time of each part until a moment.
type reading struct {
	at    time.Time
	parts map[string]time.Duration
}

func (c *meter) read() (reading, error) {
	r := reading{at: time.Now(), parts: map[string]time.Duration{}}
	var self unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &self); err != nil {
		return r, fmt.Errorf("reading the CPU time of this process: %w", err)
	}
	rest, err := c.cgroups.CPU(clusterCgroup)
	if err != nil {
		return r, err
	}
	for pid, part := range c.processes {
		used, err := host.CPUTime(pid)
		if err != nil {
			return r, err
		}
		r.parts[part] += used
		rest -= used
	}
	for cgroup, part := range c.pods {
		used, err := c.cgroups.CPU(cgroup)
		if err != nil {
			return r, err
		}
		r.parts[part] += used
		rest -= used
	}
	r.parts[Shims] = rest
	r.parts[Client] = time.Duration(self.Utime.Nano() + self.Stime.Nano())
	return r, nil
}

// during measures what is used while a function runs.
func (c *meter) during(f func() error) (Usage, error) {
	before, err := c.read()
	if err != nil {
		return Usage{}, err
	}
	if err := f(); err != nil {
		return Usage{}, err
	}
	after, err := c.read()
	if err != nil {
		return Usage{}, err
	}
	return after.since(before), nil
}

func (r reading) since(before reading) Usage {
	u := Usage{Wall: r.at.Sub(before.at), Parts: map[string]float64{}}
	for part := range maps.Keys(r.parts) {
		u.Parts[part] = (r.parts[part] - before.parts[part]).Seconds()
	}
	return u
}
