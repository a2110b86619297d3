// Package ctrd is the access to containerd that the agent and the janitor share: the connection, the translation of a pool's
// runtime handler, and the complete removal of a container. It never decides which container may be removed: its callers do.
// All of it may be called concurrently.
package ctrd

import (
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/dialer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd/node"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// Defaults of every component that talks to containerd.
const (
	// DefaultSocket is where containerd listens on most hosts.
	DefaultSocket = "/run/containerd/containerd.sock"
	// DefaultStateDir is where containerd keeps the state of running containers.
	DefaultStateDir = "/run/containerd"
	// DefaultNamespace is the kubelet's, so that images on the node need no pull.
	DefaultNamespace = "k8s.io"
	// DefaultSnapshotter keeps root file systems.
	DefaultSnapshotter = "overlayfs"
	// DefaultLogRoot is the host's directory of sandboxes' output.
	DefaultLogRoot = "/var/log/fast-sandbox"
	// DefaultCgroupRoot is where a host's cgroups are mounted.
	DefaultCgroupRoot = "/sys/fs/cgroup"
)

// Names in a container's log directory that agent and janitor share.
const (
	// OutputFile is the container's output.
	OutputFile = "output.log"
	// OwnerFile holds the uid of the agent's Pod.
	OwnerFile = "owner"
	// LimitFile holds the number of bytes of output that the agent keeps, in decimal.
	LimitFile = node.LimitFile
	// ClaimDir is the private directory of a slot whose claim is not complete.
	ClaimDir = "claim"
	// ClaimedDir is its name once the claim is complete. It is removed with the container: while a namespace may still have it mounted, the
	// kernel takes several milliseconds for that.
	ClaimedDir = "claimed"
	// NewLogPrefix, with the owner and a dash, begins the name of a log directory that is being created.
	NewLogPrefix = ".new-"
)

// Keys of container extensions.
const (
	// RecordKey holds the SandboxRecord (google.protobuf.Any of fastsandbox.agent.v1.SandboxRecord).
	RecordKey = "fast-sandbox.io/record"
	// ReportKey holds the last SandboxReport of a sandbox whose process has ended and whose task is deleted.
	ReportKey = "fast-sandbox.io/report"
)

// Dial returns a client of the containerd at socket. It does no I/O: the client connects at its first call, and reconnects
// within about half a second after containerd has restarted. Every call is in the namespace, and belongs to the trace of its
// context. It reads no blob larger than MaxDocument.
func Dial(socket, namespace string) (*client.Client, error) {
	c, err := client.New(socket, client.WithDefaultNamespace(namespace), client.WithDialOpts([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(dialer.ContextDialer),
		grpc.WithStatsHandler(tracing{obs.ClientHandler()}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 500 * time.Millisecond},
			MinConnectTimeout: time.Second,
		}),
	}))
	if err != nil {
		return nil, fmt.Errorf("dialing containerd at %s: %w", socket, err)
	}
	conn, ok := c.Conn().(*grpc.ClientConn)
	if !ok {
		return nil, fmt.Errorf("dialing containerd at %s: its connection is a %T", socket, c.Conn())
	}
	limited, err := client.NewWithConn(conn, client.WithDefaultNamespace(namespace),
		client.WithServices(client.WithContentStore(documents{c.ContentStore()})))
	if err != nil {
		return nil, fmt.Errorf("dialing containerd at %s: %w", socket, err)
	}
	return limited, nil
}
