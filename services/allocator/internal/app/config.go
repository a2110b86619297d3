package app

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/spf13/pflag"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/internal/limit"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

// Modes of creates, as flag values.
const (
	modeFast   = "fast"
	modeStrong = "strong"
)

// minHeartbeatTimeout is two heartbeats: agents send one each second.
const minHeartbeatTimeout = 2 * time.Second

// Config are the allocator's settings.
type Config struct {
	daemon.Common
	// BindAddress of the gRPC server.
	BindAddress string
	// AgentPort is the port of every agent's gRPC server, on its Pod's IP.
	AgentPort int
	// ConsistencyMode of creates that set none: fast or strong.
	ConsistencyMode string
	// OrphanTimeout is how long a container without a sandbox is kept.
	OrphanTimeout time.Duration
	// CreateTimeout bounds a create without a deadline.
	CreateTimeout time.Duration
	// HeartbeatTimeout is the silence after which an agent is not ready, and the controller may take it for lost.
	HeartbeatTimeout time.Duration
	// WriteQueueLimit is how many custom resources may wait to be written.
	WriteQueueLimit int
	// Kubeconfig is a file; empty for the Pod's own service account.
	Kubeconfig string
	// Access has the settings of authentication and authorization.
	Access auth.Options
	// Limits are those of each user.
	Limits limit.Options
	// Election has the settings of leader election.
	Election
}

// Election has the settings of leader election.
type Election struct {
	// LeaderElect is false for an allocator that runs alone and always leads.
	LeaderElect bool
	// Namespace of the Lease; PodName identifies this process in it.
	Namespace, PodName string
	// AdvertiseAddress (host:port) of the gRPC server for the other replicas. Empty: PodIP and the port of the server.
	AdvertiseAddress, PodIP string
	// Lease is the election's timing.
	Lease leader.Timing
}

// NewConfig returns the defaults.
func NewConfig() *Config { return &Config{} }

// AddFlags implements daemon.Config.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.Common.AddFlags(fs)
	fs.StringVar(&c.BindAddress, "bind-address", ":9090", "`address` of the gRPC server")
	fs.IntVar(&c.AgentPort, "agent-port", 5758, "`port` of agents' gRPC servers")
	fs.StringVar(&c.ConsistencyMode, "fastpath-consistency-mode", modeFast, "`mode` of creates that set none: fast or strong")
	fs.DurationVar(&c.OrphanTimeout, "fastpath-orphan-timeout", 10*time.Second, "`time` after which a container that belongs to no sandbox is deleted")
	fs.DurationVar(&c.CreateTimeout, "create-timeout", time.Minute, "`time` after which a create without a deadline ends")
	fs.DurationVar(&c.HeartbeatTimeout, "heartbeat-timeout", registry.DefaultHeartbeatTimeout, "`time` of silence after which an agent takes no new sandboxes and may be taken for lost; the controller follows it")
	fs.IntVar(&c.WriteQueueLimit, "write-queue-limit", 10000, "`number` of sandboxes that may wait to be written to the API server")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "kubeconfig `file`; empty: the Pod's service account")
	c.Access.AddFlags(fs)
	c.Limits.AddFlags(fs)
	c.addFlags(fs)
}

func (e *Election) addFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&e.LeaderElect, "leader-elect", true, "elect one leader among several replicas by a Lease; false for an allocator that runs alone")
	fs.StringVar(&e.Namespace, "namespace", "", "`namespace` of the Lease")
	fs.StringVar(&e.PodName, "pod-name", "", "`name` of this process's Pod")
	fs.StringVar(&e.PodIP, "pod-ip", "", "`address` of this process's Pod")
	fs.StringVar(&e.AdvertiseAddress, "advertise-address", "", "`address` (host:port) of this replica for the others; empty: the Pod's IP and the port of --bind-address")
	e.Lease.AddFlags(fs)
	config.BindEnv(fs, "namespace", "POD_NAMESPACE")
	config.BindEnv(fs, "pod-name", "POD_NAME")
	config.BindEnv(fs, "pod-ip", "POD_IP")
}

func (e *Election) validate(bindAddress string) []error {
	if !e.LeaderElect {
		return nil
	}
	var problems []error
	if e.Namespace == "" {
		problems = append(problems, errors.New("--namespace is required (or POD_NAMESPACE, or --leader-elect=false)"))
	}
	if address, err := e.advertise(bindAddress); err != nil {
		problems = append(problems, fmt.Errorf("--advertise-address is %q, want host:port (or POD_IP, or --leader-elect=false)", address))
	}
	return append(problems, e.Lease.Validate()...)
}

// advertise returns the address of the server, which listens on bindAddress, for the other replicas.
func (e *Election) advertise(bindAddress string) (string, error) {
	address := e.AdvertiseAddress
	if address == "" && e.PodIP != "" {
		_, port, err := net.SplitHostPort(bindAddress)
		if err != nil {
			return "", err
		}
		address = net.JoinHostPort(e.PodIP, port)
	}
	host, port, err := net.SplitHostPort(address)
	if err == nil && (host == "" || port == "") {
		err = errors.New("missing host or port")
	}
	return address, err
}

// Validate implements daemon.Config.
func (c *Config) Validate() error {
	problems := c.Common.Validate()
	if c.BindAddress == "" {
		problems = append(problems, errors.New("--bind-address must be set"))
	}
	if c.AgentPort < 1 || c.AgentPort > 65535 {
		problems = append(problems, fmt.Errorf("--agent-port is %d, want 1 to 65535", c.AgentPort))
	}
	if c.ConsistencyMode != modeFast && c.ConsistencyMode != modeStrong {
		problems = append(problems, fmt.Errorf("--fastpath-consistency-mode is %q, want %s or %s", c.ConsistencyMode, modeFast, modeStrong))
	}
	if c.OrphanTimeout <= 0 {
		problems = append(problems, fmt.Errorf("--fastpath-orphan-timeout is %s, want more than 0", c.OrphanTimeout))
	}
	if c.CreateTimeout <= 0 {
		problems = append(problems, fmt.Errorf("--create-timeout is %s, want more than 0", c.CreateTimeout))
	}
	if c.HeartbeatTimeout < minHeartbeatTimeout {
		problems = append(problems, fmt.Errorf("--heartbeat-timeout is %s, want at least %s", c.HeartbeatTimeout, minHeartbeatTimeout))
	}
	if c.WriteQueueLimit < 1 {
		problems = append(problems, fmt.Errorf("--write-queue-limit is %d, want at least 1", c.WriteQueueLimit))
	}
	problems = append(append(problems, c.Access.Validate()...), c.Limits.Validate()...)
	return errors.Join(append(problems, c.validate(c.BindAddress)...)...)
}

func (c *Config) mode() sandboxv1.ConsistencyMode {
	if c.ConsistencyMode == modeStrong {
		return sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG
	}
	return sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST
}
