// Package ctrd is what the agent and the janitor share of containerd: how to connect, how a pool's runtime handler is
// spelled in containerd's terms, and how a container is taken away so that nothing of it is left. It decides nothing:
// who may be taken away is its callers' business. All of it may be called concurrently.
package ctrd

import (
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/dialer"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
)

// Defaults of every component that talks to containerd.
const (
	// DefaultSocket is where containerd listens on most hosts.
	DefaultSocket = "/run/containerd/containerd.sock"
	// DefaultStateDir is where containerd keeps what it needs of running containers.
	DefaultStateDir = "/run/containerd"
	// DefaultNamespace is the kubelet's, so that images that the node has need no pull.
	DefaultNamespace = "k8s.io"
	// DefaultSnapshotter keeps root file systems.
	DefaultSnapshotter = "overlayfs"
	// DefaultLogRoot is the host's directory of sandboxes' output.
	DefaultLogRoot = "/var/log/fast-sandbox"
	// DefaultCgroupRoot is where a host's cgroups are.
	DefaultCgroupRoot = "/sys/fs/cgroup"
)

// Names in a container's log directory that agent and janitor both know.
const (
	// OutputFile is what the container has written.
	OutputFile = "output.log"
	// OwnerFile holds the uid of the agent's Pod.
	OwnerFile = "owner"
	// ClaimDir is the private directory of a slot that was not claimed to the end.
	ClaimDir = "claim"
	// NewLogPrefix, with the owner and a dash, begins the name of a log directory that is being made.
	NewLogPrefix = ".new-"
)

// Keys of container extensions.
const (
	// RecordKey holds the SandboxRecord (google.protobuf.Any of fastsandbox.agent.v1.SandboxRecord).
	RecordKey = "fast-sandbox.io/record"
	// ReportKey holds the last SandboxReport of a sandbox whose process has ended; its task is gone.
	ReportKey = "fast-sandbox.io/report"
)

// Dial returns a client of the containerd at socket. It does no I/O: it connects when it is first used, and again within
// about half a second when containerd comes back. Every call is in the namespace.
func Dial(socket, namespace string) (*client.Client, error) {
	c, err := client.New(socket, client.WithDefaultNamespace(namespace), client.WithDialOpts([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(dialer.ContextDialer),
		grpc.WithStatsHandler(tracing{otelgrpc.NewClientHandler()}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 500 * time.Millisecond},
			MinConnectTimeout: time.Second,
		}),
	}))
	if err != nil {
		return nil, fmt.Errorf("dialing containerd at %s: %w", socket, err)
	}
	return c, nil
}
