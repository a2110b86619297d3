// Package mesh is the suites' hands on the local cluster: the public API at the leading allocator, the Kubernetes API, the
// node's containerd, and pools of the benchmark's own. Where the cluster is comes from the environment that `make -s env`
// prints. A Mesh may be used concurrently.
package mesh

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// Namespace is the benchmark's own.
	Namespace = "fsb-bench"
	// Image is what every series runs.
	Image = "docker.io/fast-sandbox/busybox:demo"

	system    = "fast-sandbox-system"
	leaseName = "fast-sandbox-allocator"
)

// Ways to the API.
const (
	ViaLeader  = "leader"
	ViaService = "service"
)

// Options say what to connect to.
type Options struct {
	// Via is the way to the API.
	Via string
	// Handler is the runtime handler of the pools; empty for that of the cluster's default pool.
	Handler string
}

// Mesh is the connections to the cluster.
type Mesh struct {
	Kube client.WithWatch
	Node *containerd.Client
	// Sandboxes and Agents are the public API and the Registry's view.
	Sandboxes sandboxv1.SandboxServiceClient
	Agents    allocatorv1.AllocatorServiceClient
	// Way says how Sandboxes reaches the allocator.
	Way string
	// Handler is the runtime handler of every pool that Open creates.
	Handler string

	target  string
	gateway string
	dial    rpc.ClientConfig
	conns   []*grpc.ClientConn
	dirs    []string // of certificates
}

// Connect connects. By ViaLeader or an empty Via calls go straight to the leading allocator's Pod: through the Service half of all
// connections end at the standby, which passes each call on, and a run would measure which one it was given.
func Connect(ctx context.Context, o Options) (*Mesh, error) {
	env := map[string]string{}
	for _, name := range []string{"KUBECONFIG", "FSB_ADDR", "FSB_ALLOCATOR", "FSB_CERT", "FSB_KEY", "FSB_CACERT", "CONTAINERD_ADDRESS"} {
		if env[name] = config.Env(name); env[name] == "" {
			return nil, fmt.Errorf("%s is not set: run this by `make bench`, or after: eval \"$(make -s env)\"", name)
		}
	}
	m := &Mesh{dial: rpc.ClientConfig{TLS: rpc.TLS{CertFile: env["FSB_CERT"], KeyFile: env["FSB_KEY"], CAFile: env["FSB_CACERT"]}}}
	cfg, err := clientcmd.BuildConfigFromFlags("", env["KUBECONFIG"])
	if err != nil {
		return nil, fmt.Errorf("reading the kubeconfig: %w", err)
	}
	cfg.QPS, cfg.Burst = 1000, 1000
	log.SetLogger(logr.Discard())
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, fmt.Errorf("registering types: %w", err)
	}
	if m.Kube, err = client.NewWithWatch(cfg, client.Options{Scheme: scheme}); err != nil {
		return nil, fmt.Errorf("connecting to Kubernetes: %w", err)
	}
	if m.Node, err = ctrd.Dial(env["CONTAINERD_ADDRESS"], ctrd.DefaultNamespace); err != nil {
		return nil, err
	}
	m.gateway = env["FSB_ADDR"]
	m.Way, m.target = "through the Service, by whichever allocator it gives", env["FSB_ALLOCATOR"]
	if o.Via != ViaService {
		if m.target, err = m.leader(ctx); err != nil {
			return nil, errors.Join(err, m.Close())
		}
		m.Way, m.dial.ServerName = "straight to the leading allocator's Pod, mutual TLS", rpc.RoleAllocator.ServerName()
	}
	conn, err := m.Dial(ctx)
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	m.Sandboxes, m.Agents = sandboxv1.NewSandboxServiceClient(conn), allocatorv1.NewAllocatorServiceClient(conn)
	if m.Handler = o.Handler; m.Handler == "" {
		like, err := m.model(ctx)
		if err != nil {
			return nil, errors.Join(err, m.Close())
		}
		m.Handler = like.Spec.RuntimeHandler
	}
	return m, nil
}

// leader is the address of the leading allocator, as its Lease tells.
func (m *Mesh) leader(ctx context.Context) (string, error) {
	var lease coordinationv1.Lease
	if err := m.Kube.Get(ctx, client.ObjectKey{Namespace: system, Name: leaseName}, &lease); err != nil {
		return "", fmt.Errorf("finding the leading allocator: %w", err)
	}
	if lease.Spec.HolderIdentity == nil {
		return "", errors.New("finding the leading allocator: no allocator leads")
	}
	parts := strings.Split(*lease.Spec.HolderIdentity, "_")
	if len(parts) != 3 {
		return "", fmt.Errorf("finding the leading allocator: its Lease is held by %q", *lease.Spec.HolderIdentity)
	}
	return parts[1], nil
}

// Dial makes one more connection to the API and waits until it is up.
func (m *Mesh) Dial(ctx context.Context) (*grpc.ClientConn, error) {
	conn, err := rpc.Dial(m.target, m.dial)
	if err != nil {
		return nil, err
	}
	m.conns = append(m.conns, conn)
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if _, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{}, grpc.WaitForReady(true)); err != nil {
		return nil, fmt.Errorf("reaching the allocator at %s: %w", m.target, err)
	}
	return conn, nil
}

// Gateway returns a connection to the gateway's gRPC address, which is up.
func (m *Mesh) Gateway(ctx context.Context) (*grpc.ClientConn, error) {
	conn, err := rpc.Dial(m.gateway, rpc.ClientConfig{TLS: m.dial.TLS, Bulk: true, Files: true})
	if err != nil {
		return nil, err
	}
	m.conns = append(m.conns, conn)
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if _, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{}, grpc.WaitForReady(true)); err != nil {
		return nil, fmt.Errorf("reaching the gateway at %s: %w", m.gateway, err)
	}
	return conn, nil
}

// Close closes all connections.
func (m *Mesh) Close() error {
	var errs []error
	for _, c := range m.conns {
		errs = append(errs, c.Close())
	}
	for _, dir := range m.dirs {
		errs = append(errs, os.RemoveAll(dir))
	}
	return errors.Join(append(errs, m.Node.Close())...)
}

// Poll waits until the condition has no complaint, and returns the last one if the time is over.
func Poll(ctx context.Context, every, limit time.Duration, condition func(context.Context) error) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, every, limit, true, func(ctx context.Context) (bool, error) {
		last = condition(ctx)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("waited %s: %w", limit, errors.Join(last, ctx.Err()))
	}
	return nil
}
