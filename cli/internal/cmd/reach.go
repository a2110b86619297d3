package cmd

import (
	"context"
	"net"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/kinds"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// remotePort is the name of the port that janitors and garbage collectors serve gRPC on, in their Pods.
const remotePort = "grpc"

// Cluster is a Kubernetes cluster as its API server shows it; a *tunnel.Cluster is one.
type Cluster interface {
	// Pods returns those that run, in the order of their nodes.
	Pods(ctx context.Context, s tunnel.Selector) ([]tunnel.Pod, error)
	// Dial connects to a port of a Pod.
	Dial(ctx context.Context, p tunnel.Pod, port int32) (net.Conn, error)
	// Kinds returns all kinds of objects that there are.
	Kinds(ctx context.Context) (kinds.List, error)
	// Names returns names of the objects of a kind in a namespace.
	Names(ctx context.Context, k kinds.Kind, namespace string) ([]string, error)
}

// remote is what a Pod is to a person, and what it has to prove that it is.
type remote struct {
	name string
	role rpc.Role
}

// at calls do with a connection to what serves in a Pod. It goes through a tunnel, which is made anew when it breaks.
func (c *cli) at(ctx context.Context, cluster Cluster, p tunnel.Pod, r remote, do func(context.Context, *cli, *grpc.ClientConn) error) error {
	one := *c
	one.peer, one.connected, one.conn = r.name, false, nil
	port, ok := p.Ports[remotePort]
	if !ok {
		return fault.New(errdefs.ErrFailedPrecondition, tunnel.ReasonPod, "Pod %s has no port named %s", p.Name, remotePort)
	}
	// The first tunnel is made here, where its error keeps its class.
	tunnelled, err := call(ctx, &one, "reaching "+one.peer, func(ctx context.Context) (net.Conn, error) { return cluster.Dial(ctx, p, port) })
	if err != nil {
		return err
	}
	ready := make(chan net.Conn, 1)
	ready <- tunnelled
	defer func() {
		select {
		case unused := <-ready:
			_ = unused.Close()
		default:
		}
	}()
	conn, err := one.dial("passthrough:///"+p.Name, r.role, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		select {
		case first := <-ready:
			return first, nil
		default:
			return cluster.Dial(ctx, p, port)
		}
	}))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	return do(ctx, &one, conn)
}
