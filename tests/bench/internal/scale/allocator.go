package scale

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	coordinationv1 "k8s.io/api/coordination/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
)

const (
	leaseName    = "fast-sandbox-allocator"
	readyTime    = 5 * time.Minute
	takeoverTime = time.Minute
)

// allocator is one process of the real binary.
type allocator struct {
	name, address string
	began         time.Time
	cmd           *exec.Cmd
	log           string
	conn          *grpc.ClientConn
	sandboxes     sandboxv1.SandboxServiceClient
	agents        allocatorv1.AllocatorServiceClient
	ended         chan struct{} // closed when the process has ended
	kill          func()
}

// alive is an error if the process has ended.
func (a *allocator) alive() error {
	select {
	case <-a.ended:
		return fmt.Errorf("%s has ended by itself (%s)\n%s", a.name, a.cmd.ProcessState, a.tail())
	default:
		return nil
	}
}

// start starts one more allocator.
func (w *world) start() (*allocator, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("finding a port for an allocator: %w", err)
	}
	a := &allocator{name: fmt.Sprint("allocator-", len(w.allocators)+1), address: l.Addr().String()}
	if err := l.Close(); err != nil {
		return nil, fmt.Errorf("finding a port for an allocator: %w", err)
	}
	a.log = filepath.Join(w.dir, a.name+".log")
	out, err := os.Create(a.log)
	if err != nil {
		return nil, fmt.Errorf("making an allocator's log: %w", err)
	}
	defer func() { _ = out.Close() }() // the process has its own
	tls := w.tls(rpc.RoleAllocator)
	a.cmd = exec.Command(filepath.Join(w.bin, "allocator"), //nolint:noctx // it is ended by kill, which waits for it
		"--kubeconfig", w.kubeconfig, "--bind-address", a.address, "--advertise-address", a.address, "--agent-port", strconv.Itoa(w.port),
		"--tls-cert-file", tls.CertFile, "--tls-key-file", tls.KeyFile, "--tls-ca-file", tls.CAFile,
		"--metrics-bind-address", "0", "--health-probe-bind-address", "0", "--namespace", namespace, "--pod-name", a.name)
	a.cmd.Stdout, a.cmd.Stderr = out, out
	a.cmd.Env = []string{"PATH=/usr/bin:/bin"}
	a.began = time.Now()
	if err := a.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", a.name, err)
	}
	a.ended = make(chan struct{})
	go func() {
		defer close(a.ended)
		_ = a.cmd.Wait() // how it ended is in its ProcessState
	}()
	a.kill = sync.OnceFunc(func() {
		if a.conn != nil {
			_ = a.conn.Close()
		}
		_ = a.cmd.Process.Kill()
		<-a.ended
	})
	w.allocators = append(w.allocators, a)
	if a.conn, err = rpc.Dial(a.address, rpc.ClientConfig{TLS: w.tls(rpc.RoleClient), ServerName: rpc.RoleAllocator.ServerName()}); err != nil {
		return nil, err
	}
	a.sandboxes, a.agents = sandboxv1.NewSandboxServiceClient(a.conn), allocatorv1.NewAllocatorServiceClient(a.conn)
	return a, nil
}

// awaitAll waits until an allocator counts all sandboxes on agents that are all ready, and returns how long that took since
// it was started.
func (w *world) awaitAll(ctx context.Context, a *allocator) (time.Duration, error) {
	err := mesh.Poll(ctx, 100*time.Millisecond, readyTime, func(ctx context.Context) error {
		if err := a.alive(); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
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
		return 0, fmt.Errorf("%w\n%s", err, a.tail())
	}
	return time.Since(a.began), nil
}

// tail is the end of an allocator's log.
func (a *allocator) tail() string {
	raw, err := os.ReadFile(a.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	return strings.Join(lines[max(0, len(lines)-10):], "\n")
}

// holder is the name of the allocator that leads.
func (w *world) holder(ctx context.Context) (string, error) {
	var lease coordinationv1.Lease
	if err := w.kube.Get(ctx, client.ObjectKey{Namespace: namespace, Name: leaseName}, &lease); err != nil {
		return "", fmt.Errorf("reading the Lease: %w", err)
	}
	if lease.Spec.HolderIdentity == nil {
		return "", errors.New("nobody holds the Lease")
	}
	name, _, _ := strings.Cut(*lease.Spec.HolderIdentity, "_")
	return name, nil
}

func (w *world) leaderOf(ctx context.Context, a, b *allocator) (leading, standby *allocator, err error) {
	name, err := w.holder(ctx)
	switch {
	case err != nil:
		return nil, nil, err
	case name == a.name:
		return a, b, nil
	case name == b.name:
		return b, a, nil
	}
	return nil, nil, fmt.Errorf("the Lease is %q's", name)
}

// takeover kills the leader and measures the time until the standby has answered a create.
func (w *world) takeover(ctx context.Context, leading, standby *allocator) (time.Duration, error) {
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
		return 0, fmt.Errorf("creating a sandbox after the leader was killed: %w\n%s", err, standby.tail())
	}
	if name, err := w.holder(ctx); err != nil || name != standby.name {
		return 0, fmt.Errorf("%s leads after %s was killed: %w", name, leading.name, err)
	}
	w.Say("%s has taken over after %.2f s", standby.name, took.Seconds())
	return took, nil
}
