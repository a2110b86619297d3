package run

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	pool        = "chaos"
	agents      = 2
	snapshotter = ctrd.DefaultSnapshotter
	logRoot     = ctrd.DefaultLogRoot
	// bundleRoot is where the local cluster's containerd keeps a directory for each task.
	bundleRoot = "/run/fsb-local/containerd/io.containerd.runtime.v2.task/k8s.io"
	readyTime  = 3 * time.Minute
	sweepTime  = 2 * time.Minute
)

// cluster is the connections to the local cluster.
type cluster struct {
	kube  client.WithWatch
	node  *containerd.Client
	addr  string
	tls   rpc.TLS
	conns []*grpc.ClientConn
}

// connect reads where the cluster is from the environment that `make -s env` prints. It does no I/O but reading files.
func connect() (*cluster, error) {
	env := map[string]string{}
	for _, name := range []string{"KUBECONFIG", "FSB_ADDR", "FSB_CERT", "FSB_KEY", "FSB_CACERT", "CONTAINERD_ADDRESS"} {
		if env[name] = config.Env(name); env[name] == "" {
			return nil, fmt.Errorf("%s is not set: run this by `make chaos`, or after: eval \"$(make -s env)\"", name)
		}
	}
	c := &cluster{addr: env["FSB_ADDR"], tls: rpc.TLS{CertFile: env["FSB_CERT"], KeyFile: env["FSB_KEY"], CAFile: env["FSB_CACERT"]}}
	cfg, err := clientcmd.BuildConfigFromFlags("", env["KUBECONFIG"])
	if err != nil {
		return nil, fmt.Errorf("reading the kubeconfig: %w", err)
	}
	cfg.QPS, cfg.Burst = 200, 400
	log.SetLogger(logr.Discard()) // what the client library has to say of an API server that was killed
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, fmt.Errorf("registering types: %w", err)
	}
	if c.kube, err = client.NewWithWatch(cfg, client.Options{Scheme: scheme}); err != nil {
		return nil, fmt.Errorf("connecting to Kubernetes: %w", err)
	}
	c.node, err = ctrd.Dial(env["CONTAINERD_ADDRESS"], ctrd.DefaultNamespace)
	return c, err
}

func (c *cluster) close() {
	for _, conn := range c.conns {
		_ = conn.Close()
	}
	_ = c.node.Close()
}

// pause waits, unless ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// poll waits until the condition has no complaint, and returns the last one if the time is over.
func poll(ctx context.Context, limit time.Duration, condition func(context.Context) error) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, time.Second, limit, true, func(ctx context.Context) (bool, error) {
		last = condition(ctx)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("waited %s: %w", limit, errors.Join(last, ctx.Err()))
	}
	return nil
}

// makePool makes the pool of the harness, of the default one's agents.
func (c *cluster) makePool(ctx context.Context) error {
	var like v1alpha1.SandboxPool
	if err := c.kube.Get(ctx, client.ObjectKey{Namespace: namespace, Name: "default"}, &like); err != nil {
		return fmt.Errorf("reading the default pool: %w", err)
	}
	p := &v1alpha1.SandboxPool{Spec: like.Spec}
	p.Namespace, p.Name = namespace, pool
	p.Spec.MaxSandboxesPerPod = 40
	p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: agents, PoolMax: 4, BufferMin: 10, BufferMax: 120}
	if err := c.kube.Create(ctx, p); err != nil {
		return fmt.Errorf("making the pool: %w", err)
	}
	return nil
}

// awaitReady waits until every component is there again.
func (c *cluster) awaitReady(ctx context.Context) error {
	return poll(ctx, readyTime, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if _, err := c.node.Version(ctx); err != nil {
			return fmt.Errorf("asking containerd: %w", err)
		}
		var deployments appsv1.DeploymentList
		if err := c.kube.List(ctx, &deployments, client.InNamespace(system)); err != nil {
			return fmt.Errorf("listing deployments: %w", err)
		}
		for _, d := range deployments.Items {
			if d.Status.ReadyReplicas < *d.Spec.Replicas || d.Status.UpdatedReplicas < *d.Spec.Replicas {
				return fmt.Errorf("deployment %s has %d of %d ready", d.Name, d.Status.ReadyReplicas, *d.Spec.Replicas)
			}
		}
		return c.agentsReady(ctx)
	})
}

func (c *cluster) agentsReady(ctx context.Context) error {
	conn, err := rpc.Dial(c.addr, rpc.ClientConfig{TLS: c.tls})
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	list, err := allocatorv1.NewAllocatorServiceClient(conn).ListAgents(ctx, &allocatorv1.ListAgentsRequest{Namespace: namespace, Pool: pool})
	if err != nil {
		return fmt.Errorf("listing agents: %w", err)
	}
	ready := 0
	for _, a := range list.GetAgents() {
		if a.GetReady() {
			ready++
		}
	}
	if ready < agents {
		return fmt.Errorf("%d of %d agents are ready", ready, agents)
	}
	return nil
}

// sweep takes away what a run has made, whatever state it is in: sandboxes, pool, and the containers of agents that are
// gone, which no janitor takes yet.
func (c *cluster) sweep(ctx context.Context) error {
	err := poll(ctx, sweepTime, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		var list v1alpha1.SandboxList
		if err := c.kube.List(ctx, &list, client.InNamespace(namespace)); err != nil {
			return fmt.Errorf("listing sandboxes: %w", err)
		}
		left := 0
		for i := range list.Items {
			if s := &list.Items[i]; s.Spec.PoolRef == pool {
				left++
				if err := c.kube.Delete(ctx, s); client.IgnoreNotFound(err) != nil {
					return fmt.Errorf("deleting sandbox %s: %w", s.Name, err)
				}
			}
		}
		if left > 0 {
			return fmt.Errorf("%d sandboxes are left", left)
		}
		p := &v1alpha1.SandboxPool{}
		p.Namespace, p.Name = namespace, pool
		if err := c.kube.Delete(ctx, p); !apierrors.IsNotFound(err) {
			_ = c.kube.Get(ctx, client.ObjectKeyFromObject(p), p)
			return errors.Join(fmt.Errorf("the pool is left: %+v", p.Status), err)
		}
		return nil
	})
	return errors.Join(err, c.sweepNode(ctx))
}

// sweepNode removes the pool's containers whose agents are gone: all of them, once the pool is.
func (c *cluster) sweepNode(ctx context.Context) error {
	list, err := c.node.ContainerService().List(ctx, fmt.Sprintf("labels.%q==%q", v1alpha1.LabelPool, pool))
	if err != nil {
		return fmt.Errorf("listing containers: %w", err)
	}
	remover := &ctrd.Remover{Client: c.node, Snapshotter: snapshotter, LogRoot: logRoot, ProcRoot: "/proc", CgroupRoot: ctrd.DefaultCgroupRoot}
	var failed error
	for _, x := range list {
		if strings.EqualFold(x.Labels[v1alpha1.LabelManaged], "true") {
			failed = errors.Join(failed, remover.Remove(ctx, filepath.Base(x.ID)))
		}
	}
	return failed
}
