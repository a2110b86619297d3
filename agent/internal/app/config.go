// Package app is the agent as a process: its configuration, the wiring of its parts, and its readiness. It owns nothing else.
// Run is called once.
package app

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
)

// The image policies, as a SandboxPool has them.
const (
	imageCached = "Cached"
	imageVerify = "Verify"
)

// The default limits of a sandbox's files.
const (
	defaultDiskBytes  = 10 << 30
	defaultDiskInodes = 1_000_000
)

// Config is the agent's configuration.
type Config struct {
	daemon.Common

	BindAddress                                          string
	Capacity                                             int
	ContainerdSocket, ContainerdNamespace, Snapshotter   string
	RuntimeHandler                                       string
	LogRoot                                              string
	LogMaxBytes                                          int64
	StateDir                                             string
	Pool, PodName, PodNamespace, PodUID, PodIP, NodeName string
	NetNSPath, CgroupParent, CgroupRoot                  string
	DockerConfig                                         string
	InsecureRegistries                                   []string
	MaxImageBytes                                        int64
	ImagePolicy                                          string
	MaxLimits                                            resources.Limits
	AddCapabilities                                      []string
	CreateTimeout                                        time.Duration
	MemoryBytes                                          int64
	MaxDisk                                              runtime.DiskUsage
	SlotRoot, SandboxInit, Shim                          string
	SlotsMin, SlotsMax                                   int
	UserNamespace                                        string
	FirstUserID                                          uint32
	UserIDRanges                                         int
}

var _ daemon.Config = (*Config)(nil)

// AddFlags adds the agent's flags with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.Common.AddFlags(fs)
	fs.StringVar(&c.BindAddress, "bind-address", ":5758", "`address` of the agent's gRPC server")
	fs.IntVar(&c.Capacity, "capacity", 5, "number of sandboxes that can run on the agent at a time")
	fs.StringVar(&c.ContainerdSocket, "containerd-socket", shared.DefaultSocket, "`path` of containerd's socket")
	fs.StringVar(&c.ContainerdNamespace, "containerd-namespace", shared.DefaultNamespace, "containerd `namespace` of images and sandboxes")
	fs.StringVar(&c.Snapshotter, "snapshotter", shared.DefaultSnapshotter, "containerd snapshotter of root file systems")
	fs.StringVar(&c.RuntimeHandler, "runtime-handler", "fsb", "runtime of sandboxes: fsb (a shim of Fast Sandbox), runc, crun, runsc, kata, or a containerd runtime name")
	fs.StringVar(&c.LogRoot, "log-root", shared.DefaultLogRoot, "`directory` of sandboxes' output, at the same path on the host")
	fs.Int64Var(&c.LogMaxBytes, "log-max-bytes", logs.DefaultMaxBytes, "bytes of output that are kept for each sandbox")
	fs.StringVar(&c.StateDir, "state-dir", "/var/lib/fast-sandbox", "`directory` of the agent's own durable state, which lives as long as its Pod")
	fs.StringVar(&c.Pool, "pool", "", "`name` of the SandboxPool that the agent belongs to")
	fs.StringVar(&c.PodName, "pod-name", "", "name of the agent's Pod")
	fs.StringVar(&c.PodNamespace, "pod-namespace", "", "namespace of the agent's Pod")
	fs.StringVar(&c.PodUID, "pod-uid", "", "uid of the agent's Pod, whose network and cgroup the sandboxes join")
	fs.StringVar(&c.PodIP, "pod-ip", "", "IP of the agent's Pod")
	fs.StringVar(&c.NodeName, "node-name", "", "name of the agent's node")
	fs.StringVar(&c.NetNSPath, "netns-path", "", "`path`, on the host, of the network namespace of sandboxes; overrides the Pod's")
	fs.StringVar(&c.CgroupParent, "cgroup-parent", "", "parent cgroup of sandboxes (a path or NAME.slice); overrides the Pod's")
	fs.StringVar(&c.CgroupRoot, "cgroup-root", shared.DefaultCgroupRoot, "`directory` at which the host's cgroups are mounted")
	fs.StringVar(&c.DockerConfig, "docker-config", "", "Docker's config.json `file` with registry credentials, read at each pull")
	fs.StringSliceVar(&c.InsecureRegistries, "insecure-registries", nil, "`hosts` of registries that are reached over plain HTTP, besides localhost")
	fs.Int64Var(&c.MaxImageBytes, "image-max-bytes", ctrd.DefaultMaxImageBytes, "largest download, in bytes, of one image")
	fs.StringVar(&c.ImagePolicy, "image-policy", imageCached, "use of images that are on the node: Cached, or Verify to ask the registry first")
	fs.Int64Var(&c.MaxLimits.CPUMillis, "sandbox-max-cpu-millis", 0, "largest CPU limit, in thousandths of a core, that a sandbox may have; 0 is none")
	fs.Int64Var(&c.MaxLimits.MemoryBytes, "sandbox-max-memory-bytes", 0, "largest memory limit, in bytes, that a sandbox may have; 0 is none")
	fs.Int64Var(&c.MaxLimits.PIDs, "sandbox-max-pids", 0, "largest limit of processes and threads that a sandbox may have; 0 is none")
	fs.StringSliceVar(&c.AddCapabilities, "sandbox-add-capabilities", nil, "`capabilities` of sandboxes besides the default ones: NET_RAW, MKNOD, AUDIT_WRITE")
	fs.DurationVar(&c.CreateTimeout, "create-timeout", 2*time.Minute, "timeout of a create, the pull of its image included")
	fs.Int64Var(&c.MaxDisk.Bytes, "sandbox-disk-bytes", defaultDiskBytes, "disk, in bytes, that the files of a sandbox may take; one that takes more is ended; 0 is no limit")
	fs.Int64Var(&c.MaxDisk.Inodes, "sandbox-disk-inodes", defaultDiskInodes, "number of files that a sandbox may create; one that has more is ended; 0 is no limit")
	fs.Int64Var(&c.MemoryBytes, "memory-limit-bytes", defaultMemoryBytes, "limit of the agent's own memory, in bytes, without its sandboxes; 0 is none")
	fs.StringVar(&c.SlotRoot, "slot-root", "/var/lib/fast-sandbox/slots", "`directory` for the root of slots, at the same path on the host, on a file system without noexec; empty for no slots, and for no calls into sandboxes of runc")
	fs.StringVar(&c.SandboxInit, "sandbox-init", "/sandbox-init", "`path` of the binary that waits in slots")
	fs.StringVar(&c.Shim, "shim", "/containerd-shim-fsb-v1", "`path` of the shim of the runtime handler fsb, which is installed below --slot-root, with containerd-shim-fsb-member-v1 beside it")
	fs.IntVar(&c.SlotsMax, "slots-max", -1, "maximum number of slots to keep started; -1 is one for each free capacity unit, 0 is none")
	fs.IntVar(&c.SlotsMin, "slots-min", 0, "number of slots to keep even when the node is short of memory")
	fs.StringVar(&c.UserNamespace, "user-namespace", string(ctrd.UsersAuto), "user namespaces of sandboxes: Auto, Required or Disabled; only the runtime handler fsb has them")
	fs.Uint32Var(&c.FirstUserID, "user-id-first", idrange.DefaultFirst, "first user and group `id` on the node that sandboxes may have, the same for all agents of a node")
	fs.IntVar(&c.UserIDRanges, "user-id-ranges", idrange.DefaultCount, "number of ranges of 65536 ids from there, one for each sandbox and each slot of a node")
	for flag, env := range map[string]string{
		"capacity": "AGENT_CAPACITY", "containerd-socket": "CONTAINERD_SOCKET", "runtime-handler": "AGENT_RUNTIME_HANDLER",
		"pool": "AGENT_POOL", "pod-name": "POD_NAME", "pod-namespace": "POD_NAMESPACE", "pod-uid": "POD_UID",
		"pod-ip": "POD_IP", "node-name": "NODE_NAME", "slots-min": "AGENT_SLOTS_MIN", "slots-max": "AGENT_SLOTS_MAX",
	} {
		config.BindEnv(fs, flag, env)
	}
}

// validateUsers checks the user namespaces.
func (c *Config) validateUsers(add func(format string, args ...any)) {
	switch ctrd.UserNamespace(c.UserNamespace) {
	case ctrd.UsersAuto, ctrd.UsersRequired, ctrd.UsersDisabled:
	default:
		add("--user-namespace is %q, want Auto, Required or Disabled", c.UserNamespace)
	}
	if err := c.ids().Validate(); err != nil {
		add("--user-id-first, --user-id-ranges: %w", err)
	}
}

// Validate returns all problems at once, each naming its flag.
func (c *Config) Validate() error {
	problems := c.Common.Validate()
	add := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if _, _, err := net.SplitHostPort(c.BindAddress); err != nil {
		add("--bind-address: %w", err)
	}
	if c.Capacity < 1 || c.Capacity > 1000 {
		add("--capacity is %d, want 1 to 1000", c.Capacity)
	}
	if _, err := shared.ParseHandler(c.RuntimeHandler); err != nil {
		add("--runtime-handler: %w", err)
	}
	for flag, path := range map[string]string{"containerd-socket": c.ContainerdSocket, "log-root": c.LogRoot, "state-dir": c.StateDir} {
		if !strings.HasPrefix(path, "/") {
			add("--%s is %q, want an absolute path", flag, path)
		}
	}
	if c.NetNSPath != "" && !strings.HasPrefix(c.NetNSPath, "/") {
		add("--netns-path is %q, want an absolute path", c.NetNSPath)
	}
	for flag, value := range map[string]string{
		"pool": c.Pool, "pod-name": c.PodName, "pod-namespace": c.PodNamespace, "pod-uid": c.PodUID, "node-name": c.NodeName,
		"containerd-namespace": c.ContainerdNamespace, "snapshotter": c.Snapshotter,
	} {
		if value == "" {
			add("--%s is not set", flag)
		}
	}
	if net.ParseIP(c.PodIP) == nil {
		add("--pod-ip is %q, want an IP address", c.PodIP)
	}
	if c.SlotRoot != "" && !strings.HasPrefix(c.SlotRoot, "/") {
		add("--slot-root is %q, want an absolute path", c.SlotRoot)
	}
	if c.SlotsMax < -1 {
		add("--slots-max is %d, want -1 or more", c.SlotsMax)
	}
	if c.SlotsMin < 0 || (c.SlotsMax >= 0 && c.SlotsMin > c.SlotsMax) {
		add("--slots-min is %d, want 0 to --slots-max", c.SlotsMin)
	}
	c.validateBounds(add)
	c.validateUsers(add)
	if c.CreateTimeout <= 0 {
		add("--create-timeout is %s, want more than 0", c.CreateTimeout)
	}
	return errors.Join(problems...)
}

// validateBounds checks what bounds images, sandboxes and the agent itself.
func (c *Config) validateBounds(add func(format string, args ...any)) {
	if c.LogMaxBytes < 64<<10 {
		add("--log-max-bytes is %d, want at least %d", c.LogMaxBytes, 64<<10)
	}
	if c.MaxImageBytes < 1<<20 {
		add("--image-max-bytes is %d, want at least %d", c.MaxImageBytes, 1<<20)
	}
	if c.ImagePolicy != imageCached && c.ImagePolicy != imageVerify {
		add("--image-policy is %q, want %s or %s", c.ImagePolicy, imageCached, imageVerify)
	}
	if least := min(c.MaxLimits.CPUMillis, c.MaxLimits.MemoryBytes, c.MaxLimits.PIDs); least < 0 {
		add("--sandbox-max-cpu-millis, --sandbox-max-memory-bytes or --sandbox-max-pids is %d, want 0 or more", least)
	}
	if least := min(c.MaxDisk.Bytes, c.MaxDisk.Inodes); least < 0 {
		add("--sandbox-disk-bytes or --sandbox-disk-inodes is %d, want 0 or more", least)
	}
	if err := ctrd.CheckCapabilities(c.AddCapabilities); err != nil {
		add("--sandbox-add-capabilities: %w", err)
	}
	if c.MemoryBytes != 0 && c.MemoryBytes < 64<<20 {
		add("--memory-limit-bytes is %d, want 0 or at least %d", c.MemoryBytes, 64<<20)
	}
}

// reservedPorts returns the ports that the agent itself listens on in the network that its sandboxes share.
func (c *Config) reservedPorts() []int32 {
	var ports []int32
	for _, address := range []string{c.BindAddress, c.MetricsAddress} {
		_, port, err := net.SplitHostPort(address)
		if n, convErr := strconv.ParseInt(port, 10, 32); err == nil && convErr == nil && n > 0 {
			ports = append(ports, int32(n))
		}
	}
	return ports
}
