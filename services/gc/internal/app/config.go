// Package app wires the garbage collectors: PodGC, the owner-reference collector, leader election, and the safeguards around
// deletions.
package app

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/internal/limit"
)

// The modes.
const (
	// ModeEnforce collects.
	ModeEnforce = "enforce"
	// ModeObserve builds the graph and answers queries. It writes nothing.
	ModeObserve = "observe"
)

// scopeAll is the scope of all API groups; scopeCore stands for the core group, whose name is empty.
const (
	scopeAll  = "all"
	scopeCore = "core"
)

// Config is the configuration of the collectors.
type Config struct {
	daemon.Common

	BindAddress        string
	Mode               string
	Scope              []string
	Namespace          string
	LeaderElect        bool
	Lease              leader.Timing
	PodThreshold       int
	PodPeriod          time.Duration
	Quarantine         time.Duration
	Syncs              int
	DiscoveryPeriod    time.Duration
	InitialSyncTimeout time.Duration
	Ignored            []string // nil: the default of the mode
	MaxShare           float64
	MaxWindow          time.Duration
	MaxFloor           int
	RivalCheck         time.Duration
	RivalCheckPeriod   time.Duration
	Kubeconfig         string
	Access             auth.Options
	Limits             limit.Options
	KubeQPS, KubeBurst int
}

// AddFlags adds the flags, with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.Common.AddFlags(fs)
	fs.StringVar(&c.BindAddress, "bind-address", ":9090", "`address` of the gRPC server")
	fs.StringVar(&c.Mode, "mode", ModeObserve, "`mode`: enforce, or observe, which answers queries and deletes nothing (for clusters with another garbage collector)")
	fs.StringSliceVar(&c.Scope, "scope", []string{scopeAll}, "API `groups` whose objects may be deleted or patched: all, or a list in which \"core\" is the core group")
	fs.StringVar(&c.Namespace, "namespace", "", "`namespace` that this collector runs in")
	config.BindEnv(fs, "namespace", "POD_NAMESPACE")
	fs.BoolVar(&c.LeaderElect, "leader-elect", true, "delete only while holding the Lease fast-sandbox-gc")
	c.Lease.AddFlags(fs)
	c.Access.AddFlags(fs)
	c.Limits.AddFlags(fs)
	fs.IntVar(&c.PodThreshold, "terminated-pod-gc-threshold", 12500, "`number` of finished Pods to keep; 0 keeps all")
	fs.DurationVar(&c.PodPeriod, "pod-gc-period", 20*time.Second, "`interval` between rounds of PodGC")
	fs.DurationVar(&c.Quarantine, "pod-gc-quarantine", 40*time.Second, "`time` for which a Pod's node must be unknown before the API server is asked about it")
	fs.IntVar(&c.Syncs, "concurrent-gc-syncs", 20, "`number` of objects to process concurrently")
	fs.DurationVar(&c.DiscoveryPeriod, "discovery-period", 30*time.Second, "`interval` between discoveries of new kinds")
	fs.DurationVar(&c.InitialSyncTimeout, "initial-sync-timeout", 30*time.Second, "`time` to wait for the first lists before work begins without the resources that fail")
	fs.StringSliceVar(&c.Ignored, "ignored-resources", nil, "`resources` (resource.group) that are not watched (default events and events.events.k8s.io, and secrets in mode observe)")
	fs.Float64Var(&c.MaxShare, "max-delete-share", 0.5, "`share` of all objects that may be deleted within --max-delete-window; more stops all deletions; 1 means no limit")
	fs.DurationVar(&c.MaxWindow, "max-delete-window", time.Minute, "`window` over which deletions are counted")
	fs.IntVar(&c.MaxFloor, "max-delete-floor", 1000, "`number` of deletions within --max-delete-window that are always permitted")
	fs.DurationVar(&c.RivalCheck, "rival-check", 5*time.Second, "`time` to watch, before the first deletion, whether another garbage collector is active; 0 disables the check")
	fs.DurationVar(&c.RivalCheckPeriod, "rival-check-period", 10*time.Minute, "`interval` between further checks for another garbage collector; 0 checks only once")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "kubeconfig `file`; empty means the Pod's service account")
	fs.IntVar(&c.KubeQPS, "kube-api-qps", 0, "requests per second to the API server; 0 means no client-side limit: the server's priority and fairness, and --concurrent-gc-syncs, bound the load")
	fs.IntVar(&c.KubeBurst, "kube-api-burst", 0, "burst of requests to the API server; at least --kube-api-qps")
}

// Validate returns every problem at once, each naming its flag.
func (c *Config) Validate() error {
	problems := c.Common.Validate()
	require := func(ok bool, format string, args ...any) {
		if !ok {
			problems = append(problems, fmt.Errorf(format, args...))
		}
	}
	require(c.Mode == ModeEnforce || c.Mode == ModeObserve, "--mode is %q, want enforce or observe", c.Mode)
	require(len(c.Scope) > 0, "--scope is empty, want all or API groups")
	require(!slices.Contains(c.Scope, scopeAll) || len(c.Scope) == 1, "--scope has %q beside groups", scopeAll)
	require(c.Namespace != "" || c.Mode == ModeObserve, "--namespace is required (or POD_NAMESPACE)")
	require(c.PodThreshold >= 0, "--terminated-pod-gc-threshold is %d, want at least 0", c.PodThreshold)
	require(c.Syncs > 0, "--concurrent-gc-syncs is %d, want at least 1", c.Syncs)
	require(c.MaxShare > 0 && c.MaxShare <= 1, "--max-delete-share is %g, want more than 0, and at most 1", c.MaxShare)
	require(c.MaxFloor >= 0, "--max-delete-floor is %d, want at least 0", c.MaxFloor)
	require(c.KubeQPS >= 0, "--kube-api-qps is %d, want at least 0", c.KubeQPS)
	require(c.KubeBurst >= c.KubeQPS, "--kube-api-burst is %d, want at least --kube-api-qps", c.KubeBurst)
	for _, d := range []struct {
		flag         string
		value, least time.Duration
	}{
		{"pod-gc-period", c.PodPeriod, 1}, {"pod-gc-quarantine", c.Quarantine, 0}, {"discovery-period", c.DiscoveryPeriod, 1},
		{"initial-sync-timeout", c.InitialSyncTimeout, 1}, {"max-delete-window", c.MaxWindow, time.Second}, {"rival-check", c.RivalCheck, 0},
		{"rival-check-period", c.RivalCheckPeriod, 0},
	} {
		require(d.value >= d.least, "--%s is %s, want at least %s", d.flag, d.value, d.least)
	}
	problems = append(append(problems, c.Access.Validate()...), c.Limits.Validate()...)
	return errors.Join(append(problems, c.Lease.Validate()...)...)
}

// inScope reports whether objects of a group may be written.
func (c *Config) inScope(group string) bool {
	if group == "" {
		group = scopeCore
	}
	return slices.Contains(c.Scope, scopeAll) || slices.Contains(c.Scope, group)
}

// ignored returns the resources that are not watched. Events own nothing. An observer leaves Secrets out, because it would need the
// right to read them for no more than their place in the graph.
func (c *Config) ignored() []schema.GroupResource {
	names := c.Ignored
	if names == nil {
		names = []string{"events", "events.events.k8s.io"}
		if c.Mode == ModeObserve {
			names = append(names, "secrets")
		}
	}
	var out []schema.GroupResource
	for _, r := range names {
		out = append(out, schema.ParseGroupResource(r))
	}
	return out
}
