package run

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	pollutil "k8s.io/apimachinery/pkg/util/wait"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/load"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/truth"
)

const (
	pool        = "chaos"
	agents      = 2
	snapshotter = ctrd.DefaultSnapshotter
	logRoot     = ctrd.DefaultLogRoot
	// bundleRoot is where the local cluster's containerd keeps a directory for each task.
	bundleRoot = "/run/fsb-local/containerd/io.containerd.runtime.v2.task/k8s.io"
	readyTime  = 3 * time.Minute
	// sweepTime bounds the clean-up, the janitor's included: its grace, and a scan.
	sweepTime = 4 * time.Minute
	// janitor is the janitor's DaemonSet.
	janitor = "janitor"
)

// cluster holds the connections to the local cluster.
type cluster struct {
	kube client.WithWatch
	node *containerd.Client
	addr string
	// gateway is the URL of the REST API.
	gateway string
	tls     rpc.TLS
	conns   []*grpc.ClientConn
	// transport is that of the REST client.
	transport *http.Transport
}

// connect reads where the cluster is from the environment that `make -s env` prints. It does no I/O but reading files.
func connect() (*cluster, error) {
	env := map[string]string{}
	for _, name := range []string{"KUBECONFIG", "FSB_ADDR", "FSB_GATEWAY", "FSB_CERT", "FSB_KEY", "FSB_CACERT", "CONTAINERD_ADDRESS"} {
		if env[name] = config.Env(name); env[name] == "" {
			return nil, fmt.Errorf("%s is not set: run this by `make chaos`, or after: eval \"$(make -s env)\"", name)
		}
	}
	c := &cluster{addr: env["FSB_ADDR"], gateway: env["FSB_GATEWAY"], tls: rpc.TLS{CertFile: env["FSB_CERT"], KeyFile: env["FSB_KEY"], CAFile: env["FSB_CACERT"]}}
	cfg, err := clientcmd.BuildConfigFromFlags("", env["KUBECONFIG"])
	if err != nil {
		return nil, fmt.Errorf("reading the kubeconfig: %w", err)
	}
	cfg.QPS, cfg.Burst = 200, 400
	log.SetLogger(logr.Discard()) // the client library logs every failed call to an API server that was killed
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

// rest returns a client of the gateway.
func (c *cluster) rest() (*load.REST, error) {
	config, err := c.tls.ClientConfig(rpc.RoleGateway.ServerName())
	if err != nil {
		return nil, err
	}
	c.transport = &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}
	return &load.REST{Client: &http.Client{Transport: c.transport}, URL: c.gateway}, nil
}

func (c *cluster) close() {
	if c.transport != nil {
		c.transport.CloseIdleConnections()
	}
	for _, conn := range c.conns {
		_ = conn.Close()
	}
	_ = c.node.Close()
}

// wait waits, unless ctx ends.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// poll waits until the condition returns no error, and returns its last error if the time is over.
func poll(ctx context.Context, limit time.Duration, condition func(context.Context) error) error {
	var last error
	err := pollutil.PollUntilContextTimeout(ctx, time.Second, limit, true, func(ctx context.Context) (bool, error) {
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
	conn, err := rpc.Dial(c.addr, rpc.ClientConfig{TLS: c.tls, Silence: rpc.DefaultSilence})
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

// sweep deletes the sandboxes and the pool of a run, in whatever state it ended, and waits until the mesh has deleted their
// containers: those of killed agents are the janitor's.
func (c *cluster) sweep(ctx context.Context) error {
	if err := c.enableJanitor(ctx, true); err != nil {
		return err
	}
	err := poll(ctx, sweepTime, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		return c.deleteObjects(ctx)
	})
	return errors.Join(err, poll(ctx, sweepTime, c.nodeIsClean))
}

// deleteObjects deletes sandboxes, pool and garbage, and returns an error while some of them exist.
func (c *cluster) deleteObjects(ctx context.Context) error {
	if err := c.kube.DeleteAllOf(ctx, &corev1.ConfigMap{}, client.InNamespace(namespace), client.MatchingLabels{truth.GarbageLabel: pool}); err != nil {
		return fmt.Errorf("deleting ConfigMaps: %w", err)
	}
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
}

// nodeIsClean returns an error while a container of the pool exists.
func (c *cluster) nodeIsClean(ctx context.Context) error {
	list, err := c.node.ContainerService().List(ctx, fmt.Sprintf("labels.%q==%q", v1alpha1.LabelPool, pool))
	if err != nil {
		return fmt.Errorf("listing containers: %w", err)
	}
	var left []string
	for _, x := range list {
		if strings.EqualFold(x.Labels[v1alpha1.LabelManaged], "true") {
			left = append(left, x.ID)
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("the janitor has not deleted %d containers: %v", len(left), left)
	}
	return nil
}

// nowhere is a node selector that no node matches.
const nowhere = "fast-sandbox.io/disabled-by-chaos"

// enableJanitor lets the janitor's DaemonSet run on the nodes, or nowhere, and returns once that is so.
func (c *cluster) enableJanitor(ctx context.Context, enabled bool) error {
	value := `"true"`
	if enabled {
		value = "null"
	}
	patch := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"template":{"spec":{"nodeSelector":{"`+nowhere+`":`+value+`}}}}}`))
	err := poll(ctx, readyTime, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		d := &appsv1.DaemonSet{}
		d.Namespace, d.Name = janitors, janitor
		if err := c.kube.Patch(ctx, d, patch); err != nil {
			return fmt.Errorf("changing the janitor: %w", err)
		}
		if s := d.Status; s.ObservedGeneration < d.Generation || (s.DesiredNumberScheduled > 0) != enabled ||
			s.CurrentNumberScheduled != s.DesiredNumberScheduled || s.NumberAvailable != s.DesiredNumberScheduled {
			return fmt.Errorf("the janitor should be enabled: %t; status %+v", enabled, s)
		}
		return nil
	})
	if err != nil || enabled {
		return err
	}
	return poll(ctx, readyTime, func(ctx context.Context) error {
		var pods corev1.PodList
		if err := c.kube.List(ctx, &pods, client.InNamespace(janitors), client.MatchingLabels{"app.kubernetes.io/name": janitor}); err != nil {
			return fmt.Errorf("listing the janitor's Pods: %w", err)
		}
		if len(pods.Items) > 0 {
			return errors.New("the janitor still runs")
		}
		return nil
	})
}
