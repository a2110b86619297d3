package scale

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/process"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/swarm"
)

const (
	namespace = "default"
	pool      = "bench"
	// spare is the capacity of each agent for the sandboxes of the load.
	spare = 10
)

// testbed is the environment of the allocators.
type testbed struct {
	Options
	bin, dir   string
	api        *apiserver.Server
	swarm      *swarm.Swarm
	port       int // of all agents
	allocators []*allocator
}

// newTestbed starts an API server with etcd. The testbed must be closed even after an error.
func newTestbed(o Options, bin, dir string) (*testbed, error) {
	w := &testbed{Options: o, bin: bin, dir: dir}
	w.Say("starting an API server")
	var err error
	w.api, err = apiserver.Start(apiserver.Options{Bin: bin, Dir: dir, Roles: []rpc.Role{rpc.RoleAgent, rpc.RoleAllocator}})
	if err != nil {
		return w, err
	}
	w.swarm, err = swarm.New(w.api.TLS(rpc.RoleAgent), o.Heartbeat)
	return w, err
}

func (w *testbed) close() error {
	for _, a := range w.allocators {
		a.kill()
	}
	if w.swarm != nil {
		w.swarm.Stop()
	}
	return w.api.Stop()
}

// populate makes the pool, the agents with their Pods, and the custom resources of all that runs on them.
func (w *testbed) populate(ctx context.Context) error {
	free, err := process.FreeAddress(address(0))
	if err != nil {
		return err
	}
	agents, err := netip.ParseAddrPort(free)
	if err != nil {
		return fmt.Errorf("finding a port for the agents: %w", err)
	}
	w.port = int(agents.Port())
	p := &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: pool}}
	p.Spec.MaxSandboxesPerPod = int32(w.Sandboxes + spare)
	p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: int32(w.Agents), PoolMax: int32(w.Agents)}
	p.Spec.AgentTemplate.Spec.Containers = []corev1.Container{{Name: "agent", Image: "agent"}}
	if err := w.api.Kube.Create(ctx, p); err != nil {
		return fmt.Errorf("making the pool: %w", err)
	}
	began := time.Now()
	infos := make([]*agentv1.AgentInfo, w.Agents)
	if err := apiserver.Each(ctx, w.Agents, func(ctx context.Context, i int) (err error) {
		infos[i], err = w.agent(ctx, i)
		return err
	}); err != nil {
		return fmt.Errorf("making agents' Pods: %w", err)
	}
	w.Say("%d Pods exist after %.0f s", w.Agents, time.Since(began).Seconds())
	resources := make([]*v1alpha1.Sandbox, 0, w.Agents*w.Sandboxes)
	for i, info := range infos {
		var reports []*agentv1.SandboxReport
		for j := range w.Sandboxes {
			r := reportOf(info, i, j)
			reports = append(reports, r)
			resources = append(resources, apiserver.Sandbox(info, r, w.port))
		}
		files, err := w.api.AgentTLS(info)
		if err != nil {
			return err
		}
		if err := w.swarm.Add(info, files, images(), reports); err != nil {
			return err
		}
	}
	began = time.Now()
	if err := apiserver.Each(ctx, len(resources), func(ctx context.Context, i int) error {
		if i > 0 && i%20_000 == 0 {
			w.Say("%d of %d custom resources", i, len(resources))
		}
		return w.api.Kube.Create(ctx, resources[i])
	}); err != nil {
		return fmt.Errorf("filling the API server: %w", err)
	}
	w.Say("%d custom resources exist after %.0f s", len(resources), time.Since(began).Seconds())
	return w.swarm.Serve(w.port)
}

// agent makes the Pod of an agent on a node of its own.
func (w *testbed) agent(ctx context.Context, i int) (*agentv1.AgentInfo, error) {
	info := &agentv1.AgentInfo{
		PodName: fmt.Sprintf("agent-%05d", i), Namespace: namespace, Pool: pool, NodeName: fmt.Sprintf("node-%05d", i), PodIp: address(i),
		Capacity: int32(w.Sandboxes + spare), RuntimeHandler: "runc",
	}
	return info, w.api.Agent(ctx, info)
}

// address is the loopback address of an agent: 127.1.0.1 and up.
func address(i int) string {
	i++
	return fmt.Sprintf("127.1.%d.%d", i/250, i%250)
}
