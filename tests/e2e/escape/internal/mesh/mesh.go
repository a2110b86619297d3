// Package mesh connects the suite to the local cluster and keeps what a run makes there: two tenants, each with a namespace, a user and a
// pool. Setup must have ended before anything else is called; then all methods may be called concurrently.
package mesh

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/runtime"
	pollutil "k8s.io/apimachinery/pkg/util/wait"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// System is the namespace of the mesh's components.
	System = "fast-sandbox-system"
	// Audience is that of tokens for Fast Sandbox.
	Audience = "fast-sandbox.io"
	// ReadyTime is how long agents may take to be ready, SettleTime how long the mesh may take to remove what was deleted.
	ReadyTime  = 2 * time.Minute
	SettleTime = 90 * time.Second
	tick       = 200 * time.Millisecond
)

// Mesh is a connection to the local cluster, as its administrator.
type Mesh struct {
	// Kube is the API server, and KubeConfig how it is reached.
	Kube       client.WithWatch
	KubeConfig *rest.Config
	// Node is the node's containerd, in the namespace of Kubernetes, and Socket its address.
	Node   *containerd.Client
	Socket string
	// Addr is the address of the allocator, and Gateway the URL of the gateway.
	Addr, Gateway string
	// TLS is the administrator's certificate. CAFile has the authorities that it trusts.
	TLS rpc.TLS

	mu    sync.Mutex
	conns []*grpc.ClientConn
}

// Connect reads where the cluster is from the environment that `make -s env` prints.
func Connect() (*Mesh, error) {
	env := map[string]string{}
	for _, name := range []string{"KUBECONFIG", "FSB_ADDR", "FSB_GATEWAY", "FSB_CERT", "FSB_KEY", "FSB_CACERT", "CONTAINERD_ADDRESS"} {
		if env[name] = config.Env(name); env[name] == "" {
			return nil, fmt.Errorf("%s is not set: run this by `make escape`, or after: eval \"$(make -s env)\"", name)
		}
	}
	m := &Mesh{Addr: env["FSB_ADDR"], Gateway: env["FSB_GATEWAY"], Socket: env["CONTAINERD_ADDRESS"],
		TLS: rpc.TLS{CertFile: env["FSB_CERT"], KeyFile: env["FSB_KEY"], CAFile: env["FSB_CACERT"]}}
	log.SetLogger(logr.Discard())
	var err error
	if m.KubeConfig, err = clientcmd.BuildConfigFromFlags("", env["KUBECONFIG"]); err != nil {
		return nil, fmt.Errorf("reading the kubeconfig: %w", err)
	}
	m.KubeConfig.QPS, m.KubeConfig.Burst = 200, 400
	if m.Kube, err = m.kubeAs(m.KubeConfig); err != nil {
		return nil, err
	}
	m.Node, err = containerd.New(m.Socket, containerd.WithDefaultNamespace(ctrd.DefaultNamespace), containerd.WithTimeout(10*time.Second))
	if err != nil {
		return nil, fmt.Errorf("connecting to containerd: %w", err)
	}
	return m, nil
}

func (m *Mesh) kubeAs(cfg *rest.Config) (client.WithWatch, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, fmt.Errorf("registering types: %w", err)
	}
	c, err := client.NewWithWatch(cfg, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("connecting to Kubernetes: %w", err)
	}
	return c, nil
}

// Close closes the connections.
func (m *Mesh) Close() {
	for _, c := range m.conns {
		_ = c.Close()
	}
	_ = m.Node.Close()
}

// Dial connects to the allocator with a token, or with neither token nor certificate. Close closes it.
func (m *Mesh) Dial(token string) (*grpc.ClientConn, error) {
	cfg := rpc.ClientConfig{TLS: rpc.TLS{CAFile: m.TLS.CAFile}, Silence: rpc.DefaultSilence}
	if token != "" {
		cfg.Token = func() (string, error) { return token, nil }
	}
	conn, err := rpc.Dial(m.Addr, cfg)
	if err == nil {
		m.keep(conn)
	}
	return conn, err
}

func (m *Mesh) keep(conn *grpc.ClientConn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.conns = append(m.conns, conn)
}

// Poll waits until the condition returns no error, and returns its last error if the time is over.
func Poll(ctx context.Context, limit time.Duration, condition func(context.Context) error) error {
	var last error
	err := pollutil.PollUntilContextTimeout(ctx, tick, limit, true, func(ctx context.Context) (bool, error) {
		last = condition(ctx)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("waited %s: %w", limit, errors.Join(last, ctx.Err()))
	}
	return nil
}

// Wait waits, unless ctx ends.
func Wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
