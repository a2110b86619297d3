package scale

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/swarm"
)

const (
	namespace = "default"
	pool      = "bench"
	// spare places of each agent, for what the load creates.
	spare = 10
	// writers is how many calls fill the API server at a time.
	writers = 24
)

// world is everything around the allocators.
type world struct {
	Options
	bin, dir   string
	env        *envtest.Environment
	kube       client.WithWatch
	kubeconfig string
	issuer     *pki.Authority
	swarm      *swarm.Swarm
	port       int // of all agents
	allocators []*allocator
}

// newWorld starts an API server with etcd. The world must be closed even after an error.
func newWorld(o Options, bin, dir string) (*world, error) {
	w := &world{Options: o, bin: bin, dir: dir}
	log.SetLogger(logr.Discard())
	w.Say("starting an API server")
	crds := envtest.CRDInstallOptions{Paths: []string{filepath.Join("deploy", "crd")}, ErrorIfPathMissing: true}
	if err := envtest.ReadCRDFiles(&crds); err != nil {
		return w, fmt.Errorf("reading the custom resources' definitions: %w", err)
	}
	withoutStatusCalls(&crds)
	w.env = &envtest.Environment{CRDs: crds.CRDs, BinaryAssetsDirectory: filepath.Join(bin, "k8s")}
	w.env.ControlPlane.GetAPIServer().Configure().
		Append("disable-admission-plugins", "ServiceAccount").
		Append("max-requests-inflight", "2000").Append("max-mutating-requests-inflight", "1000")
	cfg, err := w.env.Start()
	if err != nil {
		return w, fmt.Errorf("starting etcd and kube-apiserver: %w", err)
	}
	w.kubeconfig = filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(w.kubeconfig, w.env.KubeConfig, 0o600); err != nil {
		return w, fmt.Errorf("writing a kubeconfig: %w", err)
	}
	cfg.QPS, cfg.Burst = -1, -1
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), coordinationv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme), metav1.AddMetaToScheme(scheme)); err != nil {
		return w, fmt.Errorf("registering types: %w", err)
	}
	if w.kube, err = client.NewWithWatch(cfg, client.Options{Scheme: scheme}); err != nil {
		return w, fmt.Errorf("connecting to Kubernetes: %w", err)
	}
	if w.issuer, err = pki.Make(dir); err != nil {
		return w, err
	}
	for _, role := range []rpc.Role{rpc.RoleAgent, rpc.RoleAllocator, rpc.RoleClient} {
		if _, err := w.issuer.Issue(role); err != nil {
			return w, err
		}
	}
	w.swarm, err = swarm.New(w.tls(rpc.RoleAgent), o.Heartbeat)
	return w, err
}

// withoutStatusCalls lets a create set the status, which takes a second call otherwise: filling the API server is no part
// of the measurement. The allocator writes no status.
func withoutStatusCalls(crds *envtest.CRDInstallOptions) {
	for _, crd := range crds.CRDs {
		if crd.Spec.Names.Kind != "Sandbox" {
			continue
		}
		for i := range crd.Spec.Versions {
			crd.Spec.Versions[i].Subresources = nil
		}
	}
}

// tls is where the issuer has put the certificate of a role.
func (w *world) tls(role rpc.Role) rpc.TLS {
	return rpc.TLS{
		CertFile: filepath.Join(w.dir, string(role)+".crt"), KeyFile: filepath.Join(w.dir, string(role)+".key"), CAFile: filepath.Join(w.dir, "ca.crt"),
	}
}

func (w *world) close() error {
	for _, a := range w.allocators {
		a.kill()
	}
	if w.swarm != nil {
		w.swarm.Stop()
	}
	if w.env == nil {
		return nil
	}
	return w.env.Stop()
}

// populate makes the pool, the agents with their Pods, and the custom resources of all that runs on them.
func (w *world) populate(ctx context.Context) error {
	l, err := net.Listen("tcp", "127.1.0.1:0")
	if err != nil {
		return fmt.Errorf("finding a port for the agents: %w", err)
	}
	w.port = l.Addr().(*net.TCPAddr).Port
	if err := l.Close(); err != nil {
		return fmt.Errorf("finding a port for the agents: %w", err)
	}
	p := &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: pool}}
	p.Spec.MaxSandboxesPerPod = int32(w.Sandboxes + spare)
	p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: int32(w.Agents), PoolMax: int32(w.Agents)}
	p.Spec.AgentTemplate.Spec.Containers = []corev1.Container{{Name: "agent", Image: "agent"}}
	if err := w.kube.Create(ctx, p); err != nil {
		return fmt.Errorf("making the pool: %w", err)
	}
	began := time.Now()
	infos := make([]*agentv1.AgentInfo, w.Agents)
	if err := w.each(ctx, w.Agents, func(ctx context.Context, i int) (err error) {
		infos[i], err = w.pod(ctx, i)
		return err
	}); err != nil {
		return fmt.Errorf("making agents' Pods: %w", err)
	}
	w.Say("%d Pods are there after %.0f s", w.Agents, time.Since(began).Seconds())
	resources := make([]*v1alpha1.Sandbox, 0, w.Agents*w.Sandboxes)
	for i, info := range infos {
		var reports []*agentv1.SandboxReport
		for j := range w.Sandboxes {
			r := reportOf(info, i, j)
			reports = append(reports, r)
			resources = append(resources, resourceOf(info, r, w.port))
		}
		w.swarm.Add(info, images(), reports)
	}
	began = time.Now()
	if err := w.each(ctx, len(resources), func(ctx context.Context, i int) error {
		if i > 0 && i%20_000 == 0 {
			w.Say("%d of %d custom resources", i, len(resources))
		}
		return w.kube.Create(ctx, resources[i])
	}); err != nil {
		return fmt.Errorf("filling the API server: %w", err)
	}
	w.Say("%d custom resources are there after %.0f s", len(resources), time.Since(began).Seconds())
	return w.swarm.Serve(w.port)
}

// each calls f with every number below n, several at a time.
func (w *world) each(ctx context.Context, n int, f func(context.Context, int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(writers)
	for i := range n {
		if ctx.Err() != nil {
			break
		}
		g.Go(func() error { return f(ctx, i) })
	}
	return g.Wait()
}

// pod makes a Pod that claims to be an agent on a node of its own.
func (w *world) pod(ctx context.Context, i int) (*agentv1.AgentInfo, error) {
	ip := address(i)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: fmt.Sprintf("agent-%05d", i),
			Labels: map[string]string{v1alpha1.LabelComponent: v1alpha1.ComponentAgent, v1alpha1.LabelPool: pool},
		},
		Spec: corev1.PodSpec{NodeName: fmt.Sprintf("node-%05d", i), Containers: []corev1.Container{{Name: "agent", Image: "agent"}}},
	}
	if err := w.kube.Create(ctx, pod); err != nil {
		return nil, err
	}
	pod.Status.Phase, pod.Status.PodIP, pod.Status.PodIPs = corev1.PodRunning, ip, []corev1.PodIP{{IP: ip}}
	if err := w.kube.Status().Update(ctx, pod); err != nil {
		return nil, err
	}
	return &agentv1.AgentInfo{
		PodName: pod.Name, PodUid: string(pod.UID), Namespace: namespace, Pool: pool, NodeName: pod.Spec.NodeName, PodIp: ip,
		Capacity: int32(w.Sandboxes + spare), RuntimeHandler: "runc",
	}, nil
}

// address is the loopback address of an agent: 127.1.0.1 and up.
func address(i int) string {
	i++
	return fmt.Sprintf("127.1.%d.%d", i/250, i%250)
}
