package cmd

import (
	"context"
	"net"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/kinds"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Names of the ports on which Pods serve gRPC: those of janitors and garbage collectors, and those of agents.
const (
	remotePort = "grpc"
	agentPort  = "agent"
)

// Cluster is a Kubernetes cluster, reached through its API server. *tunnel.Cluster implements it.
type Cluster interface {
	// Pods returns the running Pods that match.
	Pods(ctx context.Context, s tunnel.Selector) ([]tunnel.Pod, error)
	// Dial connects to a port of a Pod.
	Dial(ctx context.Context, p tunnel.Pod, port int32) (net.Conn, error)
	// Sandbox returns a custom resource.
	Sandbox(ctx context.Context, namespace, name string) (*v1alpha1.Sandbox, error)
	// Kinds returns the kinds of objects that the API server serves.
	Kinds(ctx context.Context) (kinds.List, error)
	// Names returns names of the objects of a kind in a namespace.
	Names(ctx context.Context, k kinds.Kind, namespace string) ([]string, error)
}

// clusterOptions are the flags that select a cluster.
type clusterOptions struct{ kubeconfig, context string }

func (o *clusterOptions) addFlags(cmd *cobra.Command, fs *pflag.FlagSet) {
	fs.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig `file` [$KUBECONFIG]")
	fs.StringVar(&o.context, "context", "", "`context` of the kubeconfig (default: its current context)")
	_ = cmd.RegisterFlagCompletionFunc("context", cobra.NoFileCompletions)
}

// open returns the cluster.
func (o *clusterOptions) open(c *cli) (Cluster, error) {
	return c.Cluster(tunnel.Options{Kubeconfig: o.kubeconfig, Context: o.context, Getenv: c.Getenv})
}

// remote is a server in a Pod.
type remote struct {
	// name is its name for people.
	name string
	// role is the role that its certificate must have, or orRole if that is not empty.
	role, orRole rpc.Role
	// agentUID is the uid of the Pod whose agent it must be; empty for another server.
	agentUID string
	// port is the name of its port.
	port string
	// ticket, if it is set, replaces the user's own credentials, which an agent must not receive.
	ticket func() (string, error)
	// files says that the connection carries files.
	files bool
}

// at calls do with a connection to a server in a Pod. The connection goes through a tunnel, which is opened again if it breaks.
func (c *cli) at(ctx context.Context, cluster Cluster, p tunnel.Pod, r remote, do func(context.Context, *cli, *grpc.ClientConn) error) error {
	one := *c
	one.peer, one.connected, one.conn = r.name, false, nil
	port, ok := p.Ports[r.port]
	if !ok {
		return fault.New(errdefs.ErrFailedPrecondition, tunnel.ReasonPod, "Pod %s has no port named %s", p.Name, r.port)
	}
	// The first tunnel is opened here, where its error keeps its class.
	first, err := call(ctx, &one, "connecting to "+one.peer, func(ctx context.Context) (net.Conn, error) { return cluster.Dial(ctx, p, port) })
	if err != nil {
		return err
	}
	ready := make(chan net.Conn, 1)
	ready <- first
	defer func() {
		select {
		case unused := <-ready:
			_ = unused.Close()
		default:
		}
	}()
	conn, err := one.dial("passthrough:///"+p.Name, r, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
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
