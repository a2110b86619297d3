// Package app wires the controller: a manager with leader election, the index of agents, and the two controllers.
package app

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/certmanager"
)

// Who signs the certificates of agents.
const (
	byController  = "controller"
	byCertManager = "cert-manager"
)

// minCertLife leaves the kubelet, which may take two minutes to show a changed Secret, enough of the last third.
const minCertLife = 10 * time.Minute

// Config has the settings of the controller.
type Config struct {
	daemon.Common

	AllocatorAddress   string
	AgentPort          int32
	ContainerdSocket   string
	ContainerdRoot     string
	LogRoot            string
	SlotRoot           string
	AgentCertificates  string
	AgentIssuer        string
	AgentCACertFile    string
	AgentCAKeyFile     string
	AgentCertLife      time.Duration
	Namespace          string
	LeaderElect        bool
	Lease              leader.Timing
	RequeueInterval    time.Duration
	DeletionPoll       time.Duration
	ExpirationCheck    time.Duration
	ShrinkDelay        time.Duration
	MaxReconciles      int
	Kubeconfig         string
	KubeQPS, KubeBurst int
}

// AddFlags adds the flags with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.Common.AddFlags(fs)
	fs.StringVar(&c.AllocatorAddress, "allocator-address", "kubernetes:///allocator.fast-sandbox-system:9090", "gRPC `target` of the allocator")
	fs.Int32Var(&c.AgentPort, "agent-port", 5758, "`port` of the agents' gRPC server")
	fs.StringVar(&c.ContainerdSocket, "containerd-socket", "/run/containerd/containerd.sock", "`path` of containerd's socket on the nodes")
	fs.StringVar(&c.ContainerdRoot, "containerd-root", "/var/lib/containerd", "`path` of containerd's root directory on the nodes")
	fs.StringVar(&c.LogRoot, "log-root", "/var/log/fast-sandbox", "`path` of the directory of the sandboxes' logs on the nodes")
	fs.StringVar(&c.SlotRoot, "slot-root", "/var/lib/fast-sandbox/slots", "`path` of the directory of the slots' sockets on the nodes")
	fs.StringVar(&c.AgentCertificates, "agent-certificates", byController, "who signs the certificates of agents: controller, or cert-manager by its CertificateRequests")
	fs.StringVar(&c.AgentIssuer, "agent-issuer", "", "`name` of cert-manager's ClusterIssuer for agents, or Issuer/NAME for an Issuer in each namespace with a pool")
	fs.StringVar(&c.AgentCACertFile, "agent-ca-cert-file", "", "PEM `file` of the certificate, with its chain, of the authority that signs the certificates of agents")
	fs.StringVar(&c.AgentCAKeyFile, "agent-ca-key-file", "", "PEM `file` of the private key of that authority")
	fs.DurationVar(&c.AgentCertLife, "agent-certificate-life", 24*time.Hour, "`time` for which the certificate of an agent is valid; it is renewed after two thirds of that")
	fs.StringVar(&c.Namespace, "namespace", "", "`namespace` of the controller")
	config.BindEnv(fs, "namespace", "POD_NAMESPACE")
	fs.BoolVar(&c.LeaderElect, "leader-elect", true, "reconcile only while holding the Lease fast-sandbox-controller")
	c.Lease.AddFlags(fs)
	fs.DurationVar(&c.RequeueInterval, "requeue-interval", 5*time.Second, "maximum `time` between retries")
	fs.DurationVar(&c.DeletionPoll, "deletion-poll-interval", 2*time.Second, "maximum `time` between retries of a deletion")
	fs.DurationVar(&c.ExpirationCheck, "expiration-check-threshold", 30*time.Second, "`time` before its expire time at which a sandbox is reconciled")
	fs.DurationVar(&c.ShrinkDelay, "shrink-delay", time.Minute, "`time` for which an idle agent must have been surplus before it is drained")
	fs.IntVar(&c.MaxReconciles, "max-concurrent-reconciles", 16, "`number` of sandboxes that are reconciled at a time")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "kubeconfig `file`; empty: the service account of the Pod")
	fs.IntVar(&c.KubeQPS, "kube-api-qps", 200, "maximum requests per second to the API server")
	fs.IntVar(&c.KubeBurst, "kube-api-burst", 400, "maximum burst of requests to the API server")
}

// Validate returns every problem at once, each naming its flag.
func (c *Config) Validate() error {
	problems := c.Common.Validate()
	require := func(ok bool, format string, args ...any) {
		if !ok {
			problems = append(problems, fmt.Errorf(format, args...))
		}
	}
	require(c.AllocatorAddress != "", "--allocator-address is required")
	require(c.Namespace != "", "--namespace is required (or POD_NAMESPACE)")
	switch c.AgentCertificates {
	case byController:
		require(c.AgentCACertFile != "" || c.TLS.Insecure, "--agent-ca-cert-file is required (or --insecure)")
		require(c.AgentCAKeyFile != "" || c.TLS.Insecure, "--agent-ca-key-file is required (or --insecure)")
	case byCertManager:
		_, _, err := certmanager.ParseIssuer(c.AgentIssuer)
		require(err == nil, "--agent-issuer: %w", err)
	default:
		require(false, "--agent-certificates is %q, want %s or %s", c.AgentCertificates, byController, byCertManager)
	}
	require(c.AgentCertLife >= minCertLife, "--agent-certificate-life is %s, want at least %s", c.AgentCertLife, minCertLife)
	require(c.AgentPort > 0 && c.AgentPort < 65536, "--agent-port is %d, want 1 to 65535", c.AgentPort)
	require(c.MaxReconciles > 0, "--max-concurrent-reconciles is %d, want at least 1", c.MaxReconciles)
	require(c.KubeQPS > 0, "--kube-api-qps is %d, want at least 1", c.KubeQPS)
	require(c.KubeBurst >= c.KubeQPS, "--kube-api-burst is %d, want at least --kube-api-qps", c.KubeBurst)
	for _, p := range []struct{ flag, path string }{
		{"containerd-socket", c.ContainerdSocket}, {"containerd-root", c.ContainerdRoot}, {"log-root", c.LogRoot},
		{"slot-root", c.SlotRoot},
	} {
		clean := filepath.IsAbs(p.path) && filepath.Clean(p.path) == p.path && strings.Count(p.path, "/") > 1
		require(clean, "--%s is %q, want a clean absolute path below a directory", p.flag, p.path)
	}
	for _, d := range []struct {
		flag  string
		value time.Duration
	}{
		{"requeue-interval", c.RequeueInterval}, {"deletion-poll-interval", c.DeletionPoll},
		{"expiration-check-threshold", c.ExpirationCheck}, {"shrink-delay", c.ShrinkDelay},
	} {
		require(d.value > 0, "--%s is %s, want a positive duration", d.flag, d.value)
	}
	return errors.Join(append(problems, c.Lease.Validate()...)...)
}
