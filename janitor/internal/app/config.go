// Package app wires the janitor of one node: the state of the node and its sources, the sweeper, and the API for people.
package app

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"time"

	"github.com/spf13/pflag"

	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
	"github.com/fast-sandbox/fast-sandbox/internal/limit"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// Config is the configuration of the janitor.
type Config struct {
	daemon.Common

	// BindAddress of the gRPC server.
	BindAddress string
	// NodeName is the janitor's node.
	NodeName string
	// ContainerdSocket, ContainerdNamespace and Snapshotter are the same as the agents'.
	ContainerdSocket, ContainerdNamespace, Snapshotter string
	// SlotRoot is the agents' directory of slots, in which versions of the shim are installed; empty for none.
	SlotRoot string
	// LogRoot, FIFORoot, IDRoot, ProcRoot, HostProc and CgroupRoot are the host's directories; see ctrd.Remover.
	LogRoot, FIFORoot, IDRoot, ProcRoot, HostProc, StateDir, CgroupRoot string
	// CgroupParents are the parents of the cgroups of agents' Pods, below the roots of the hierarchies.
	CgroupParents []string
	// Policy is the policy of verdicts.
	Policy verdict.Policy
	// ScanInterval is the interval between full scans.
	ScanInterval time.Duration
	// Workers is the number of concurrent removals.
	Workers int
	// Kubeconfig is a file; empty means the Pod's service account.
	Kubeconfig string
	// Access has the settings of authentication and authorization.
	Access auth.Options
	// Limits are those of each user.
	Limits limit.Options
	// KubeQPS and KubeBurst bound the requests to the API server.
	KubeQPS, KubeBurst int
}

var _ daemon.Config = (*Config)(nil)

// AddFlags adds the flags, with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.Common.AddFlags(fs)
	fs.StringVar(&c.BindAddress, "bind-address", ":5759", "`address` of the gRPC server")
	fs.StringVar(&c.NodeName, "node-name", "", "`name` of the janitor's node")
	config.BindEnv(fs, "node-name", "NODE_NAME")
	fs.StringVar(&c.ContainerdSocket, "containerd-socket", ctrd.DefaultSocket, "`path` of containerd's socket")
	config.BindEnv(fs, "containerd-socket", "CONTAINERD_SOCKET")
	fs.StringVar(&c.ContainerdNamespace, "containerd-namespace", ctrd.DefaultNamespace, "containerd `namespace` of the agents' containers")
	fs.StringVar(&c.Snapshotter, "snapshotter", ctrd.DefaultSnapshotter, "`name` of the agents' snapshotter")
	fs.StringVar(&c.LogRoot, "log-root", ctrd.DefaultLogRoot, "`directory` of sandboxes' output, the same as the agents'")
	fs.StringVar(&c.FIFORoot, "fifo-root", ctrd.DefaultFIFORoot, "`directory` of the FIFOs of containerd's clients; empty disables the search for FIFOs")
	fs.StringVar(&c.SlotRoot, "slot-root", "/var/lib/fast-sandbox/slots", "`directory` of slots, the same as the agents' --slot-root; empty disables the removal of versions of the shim that are not in use")
	fs.StringVar(&c.IDRoot, "ids-root", idrange.Dir("/var/lib/fast-sandbox/slots"), "`directory` of the ranges of user ids in use, which is ids below the agents' --slot-root; empty disables the search for ranges")
	fs.StringVar(&c.ProcRoot, "proc-root", "/proc", "`directory` with the host's processes")
	fs.StringVar(&c.HostProc, "host-proc", ctrd.ProcOfContainerd, "`directory`, in /proc, of a process in containerd's mount namespace; \"containerd\" means containerd itself; empty disables the search for mounts")
	fs.StringVar(&c.StateDir, "containerd-state", ctrd.DefaultStateDir, "`directory` of containerd's state, as containerd sees it; empty disables the search for mounts")
	fs.StringVar(&c.CgroupRoot, "cgroup-root", ctrd.DefaultCgroupRoot, "`directory` with the host's cgroups")
	fs.StringSliceVar(&c.CgroupParents, "cgroup-parents", []string{"/kubepods", "/kubepods.slice"}, "`paths` of the kubelet's cgroups in which cgroups without a container are searched")
	fs.DurationVar(&c.Policy.Grace, "grace", 10*time.Second, "`time` for which a Sandbox must be missing, and its container must exist, before the container is deleted")
	fs.DurationVar(&c.Policy.LeftoverGrace, "leftover-grace", 2*time.Minute, "`time` for which a snapshot, FIFO, mount or cgroup must have no container before it is removed")
	fs.DurationVar(&c.Policy.LogRetention, "log-retention", 0, "`time` for which the output of a container is kept after the janitor deleted the container")
	fs.DurationVar(&c.ScanInterval, "scan-interval", time.Minute, "`interval` between scans of the whole node; changes are examined as they happen")
	fs.IntVar(&c.Workers, "workers", 8, "`number` of concurrent removals")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "kubeconfig `file`; empty means the Pod's service account")
	c.Access.AddFlags(fs)
	c.Limits.AddFlags(fs)
	fs.IntVar(&c.KubeQPS, "kube-api-qps", 50, "requests per second to the API server")
	fs.IntVar(&c.KubeBurst, "kube-api-burst", 100, "burst of requests to the API server")
}

// Validate returns every problem at once, each naming its flag.
func (c *Config) Validate() error {
	problems := c.Common.Validate()
	require := func(ok bool, format string, args ...any) {
		if !ok {
			problems = append(problems, fmt.Errorf(format, args...))
		}
	}
	_, _, err := net.SplitHostPort(c.BindAddress)
	require(err == nil, "--bind-address is %q, want host:port", c.BindAddress)
	require(c.NodeName != "", "--node-name is required (or NODE_NAME)")
	require(c.ContainerdNamespace != "", "--containerd-namespace is required")
	require(c.Snapshotter != "", "--snapshotter is required")
	for _, p := range []struct {
		flag, path string
		optional   bool
	}{
		{"containerd-socket", c.ContainerdSocket, false}, {"log-root", c.LogRoot, false}, {"fifo-root", c.FIFORoot, true}, {"slot-root", c.SlotRoot, true}, {"ids-root", c.IDRoot, true},
		{"proc-root", c.ProcRoot, false}, {"host-proc", c.HostProc, true}, {"containerd-state", c.StateDir, true}, {"cgroup-root", c.CgroupRoot, false},
	} {
		clean := filepath.IsAbs(p.path) && filepath.Clean(p.path) == p.path && p.path != "/"
		asked := p.flag == "host-proc" && p.path == ctrd.ProcOfContainerd
		require(clean || asked || (p.optional && p.path == ""), "--%s is %q, want a clean absolute path", p.flag, p.path)
	}
	for _, d := range []struct {
		flag  string
		value time.Duration
	}{
		{"grace", c.Policy.Grace}, {"leftover-grace", c.Policy.LeftoverGrace}, {"scan-interval", c.ScanInterval},
	} {
		require(d.value > 0, "--%s is %s, want more than nothing", d.flag, d.value)
	}
	require(c.Policy.LogRetention >= 0, "--log-retention is %s, want nothing or more", c.Policy.LogRetention)
	require(c.Workers > 0, "--workers is %d, want at least 1", c.Workers)
	require(c.KubeQPS > 0, "--kube-api-qps is %d, want at least 1", c.KubeQPS)
	require(c.KubeBurst >= c.KubeQPS, "--kube-api-burst is %d, want at least --kube-api-qps", c.KubeBurst)
	return errors.Join(append(append(problems, c.Access.Validate()...), c.Limits.Validate()...)...)
}
