package scale

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/process"
)

const (
	leaseName    = "fast-sandbox-allocator"
	readyTime    = 5 * time.Minute
	takeoverTime = time.Minute
)

// allocator is one process of the real binary.
type allocator struct {
	*process.Process

	name, address string
	conn          *grpc.ClientConn
	sandboxes     sandboxv1.SandboxServiceClient
	agents        allocatorv1.AllocatorServiceClient
}

// kill closes the connection and kills the process.
func (a *allocator) kill() {
	if a.conn != nil {
		_ = a.conn.Close() // the only possible error is that it was closed already
	}
	a.Kill()
}

// start starts one more allocator.
func (w *testbed) start() (*allocator, error) {
	address, err := process.FreeAddress("127.0.0.1")
	if err != nil {
		return nil, err
	}
	a := &allocator{name: fmt.Sprint("allocator-", len(w.allocators)+1), address: address}
	tls := w.api.TLS(rpc.RoleAllocator)
	a.Process, err = process.Start(process.Config{
		Name: a.name, Dir: w.dir, Path: filepath.Join(w.bin, "allocator"), Env: []string{"PATH=/usr/bin:/bin"},
		Args: []string{
			"--kubeconfig", w.api.Kubeconfig, "--bind-address", a.address, "--advertise-address", a.address, "--agent-port", strconv.Itoa(w.port),
			"--tls-cert-file", tls.CertFile, "--tls-key-file", tls.KeyFile, "--tls-ca-file", tls.CAFile,
			"--tls-client-cert-file", tls.ClientCertFile, "--tls-client-key-file", tls.ClientKeyFile,
			"--metrics-bind-address", "0", "--health-socket", "0", "--namespace", namespace, "--pod-name", a.name,
		},
	})
	if err != nil {
		return nil, err
	}
	w.allocators = append(w.allocators, a)
	if a.conn, err = rpc.Dial(a.address, rpc.ClientConfig{TLS: w.api.Admin, ServerName: rpc.RoleAllocator.ServerName()}); err != nil {
		return nil, err
	}
	a.sandboxes, a.agents = sandboxv1.NewSandboxServiceClient(a.conn), allocatorv1.NewAllocatorServiceClient(a.conn)
	return a, nil
}

// awaitAll waits until an allocator is ready and counts all sandboxes on agents that are all ready, and returns how long that took
// since it was started. Readiness is its own; a standby may have the leader count.
func (w *testbed) awaitAll(ctx context.Context, a *allocator) (time.Duration, error) {
	err := mesh.Poll(ctx, 100*time.Millisecond, readyTime, func(ctx context.Context) error {
		if err := a.Alive(); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		health, err := healthv1.NewHealthClient(a.conn).Check(ctx, &healthv1.HealthCheckRequest{})
		if err != nil {
			return err
		}
		if health.GetStatus() != healthv1.HealthCheckResponse_SERVING {
			return fmt.Errorf("%s is not ready", a.name)
		}
		resp, err := a.agents.GetPool(ctx, &allocatorv1.GetPoolRequest{Namespace: namespace, Name: pool})
		if err != nil {
			return err
		}
		if p := resp.GetPool(); int(p.GetReadyAgents()) != w.Agents || int(p.GetAllocated()) != w.Agents*w.Sandboxes {
			return fmt.Errorf("%s knows %d agents that are ready, with %d sandboxes", a.name, p.GetReadyAgents(), p.GetAllocated())
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("%w\n%s", err, a.Tail())
	}
	return time.Since(a.Began()), nil
}

// awaitLists waits until an allocator answers a list of sandboxes, and returns how long that took since it was started.
func (w *testbed) awaitLists(ctx context.Context, a *allocator) (time.Duration, error) {
	err := mesh.Poll(ctx, 100*time.Millisecond, readyTime, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		_, err := a.sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Namespace: namespace, PageSize: 1})
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("listing sandboxes: %w\n%s", err, a.Tail())
	}
	return time.Since(a.Began()), nil
}

// holder is the name of the allocator that leads.
func (w *testbed) holder(ctx context.Context) (string, error) {
	var lease coordinationv1.Lease
	if err := w.api.Kube.Get(ctx, client.ObjectKey{Namespace: namespace, Name: leaseName}, &lease); err != nil {
		return "", fmt.Errorf("reading the Lease: %w", err)
	}
	if lease.Spec.HolderIdentity == nil {
		return "", errors.New("the Lease has no holder")
	}
	name, _, _ := strings.Cut(*lease.Spec.HolderIdentity, "_")
	return name, nil
}

func (w *testbed) leaderOf(ctx context.Context, a, b *allocator) (leading, standby *allocator, err error) {
	name, err := w.holder(ctx)
	switch {
	case err != nil:
		return nil, nil, err
	case name == a.name:
		return a, b, nil
	case name == b.name:
		return b, a, nil
	}
	return nil, nil, fmt.Errorf("the holder of the Lease is %q", name)
}

// takeover kills the leader and measures the time until the standby has answered a create.
func (w *testbed) takeover(ctx context.Context, leading, standby *allocator) (time.Duration, error) {
	began := time.Now()
	leading.kill()
	err := mesh.Poll(ctx, 20*time.Millisecond, takeoverTime, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		_, err := standby.sandboxes.CreateSandbox(ctx, request())
		return err
	})
	took := time.Since(began)
	if err != nil {
		return 0, fmt.Errorf("creating a sandbox after the leader was killed: %w\n%s", err, standby.Tail())
	}
	if name, err := w.holder(ctx); err != nil || name != standby.name {
		return 0, fmt.Errorf("%s leads after %s was killed: %w", name, leading.name, err)
	}
	w.Say("%s has taken over after %.2f s", standby.name, took.Seconds())
	return took, nil
}
