// Package components defines what the cluster consists of: which programs run, with which arguments and configuration
// files, in which order, and how their health is checked. It is a pure function of a Config: it starts nothing and
// writes nothing. Everything may be called concurrently.
package components

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/pki"
)

// NodeName is the name of the cluster's only node.
const NodeName = "fsb-local"

// The cgroups of the cluster, the same path in every hierarchy: one tree, so that what is in it is ours.
const (
	RootCgroup   = "/fsb-local"
	SystemCgroup = RootCgroup + "/system"
)

// AgentLogDir is where agents keep the output of sandboxes on the node.
const AgentLogDir = "/var/log/fast-sandbox"

// AgentSlotDir is where agents and their slots meet on the node; nothing in it is worth keeping.
const AgentSlotDir = "/var/lib/fast-sandbox/slots"

// Config is everything that the components' configuration depends on.
type Config struct {
	// BinDir holds fsb-local itself, the directory containerd with its programs, and Fast Sandbox's own binaries.
	BinDir string `json:"binDir"`
	// DataDir keeps what outlives a reboot, RunDir what does not.
	DataDir string `json:"dataDir"`
	RunDir  string `json:"runDir"`
	// CNIDir holds the CNI plugins of the machine's distribution.
	CNIDir string `json:"cniDir"`
	// ResolvConf is the resolver configuration for Pods.
	ResolvConf string `json:"resolvConf"`
	// OwnGC says that Fast Sandbox collects garbage, and kube-controller-manager does not.
	OwnGC bool `json:"ownGC"`
	// Traces says that a trace store runs beside the cluster.
	Traces bool `json:"traces,omitempty"`
	// NoSysResource says that this machine lacks CAP_SYS_RESOURCE, so that no oom_score_adj may be lowered.
	NoSysResource bool `json:"noSysResource"`
}

// Validate returns every problem at once.
func (c Config) Validate() error {
	var problems []error
	for flag, dir := range map[string]string{"--bin-dir": c.BinDir, "--data-dir": c.DataDir, "--run-dir": c.RunDir} {
		// `down` removes both, so a mistyped one must not be a home directory.
		if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir || filepath.Dir(filepath.Dir(dir)) == filepath.Dir(dir) {
			problems = append(problems, fmt.Errorf("%s: %q is not a clean absolute path at least two levels deep", flag, dir))
		}
	}
	// A unix socket's path holds 107 characters, and containerd allows its shims' directory 38.
	if len(c.ShimSockets()) > 38 {
		problems = append(problems, fmt.Errorf("--run-dir: %q is too long for unix sockets below it", c.RunDir))
	}
	return errors.Join(problems...)
}

func (c Config) data(parts ...string) string {
	return filepath.Join(append([]string{c.DataDir}, parts...)...)
}
func (c Config) run(parts ...string) string {
	return filepath.Join(append([]string{c.RunDir}, parts...)...)
}

// Binary is fsb-local itself, as which every Kubernetes component runs too.
func (c Config) Binary() string { return filepath.Join(c.BinDir, "fsb-local") }

// ContainerdBin is the directory of containerd, its shim and ctr.
func (c Config) ContainerdBin() string { return filepath.Join(c.BinDir, "containerd") }

// ContainerdRoot is, like ContainerdState and ContainerdSocket, a contract: agents mount it from the node.
func (c Config) ContainerdRoot() string { return c.data("containerd") }

// ContainerdState is containerd's directory for what does not outlive a reboot. It is on a tmpfs, which `down` unmounts.
func (c Config) ContainerdState() string { return c.run("containerd") }

// SharedDirs are the directories that agents have as volumes with mount propagation. The kubelet sees to its own.
func (c Config) SharedDirs() []string { return []string{c.ContainerdRoot(), c.ContainerdState()} }

// ContainerdSocket is where containerd serves.
func (c Config) ContainerdSocket() string { return c.run("containerd", "containerd.sock") }

// ShimSockets is where containerd's shims serve it.
func (c Config) ShimSockets() string { return c.run("s") }

// CacheDir survives `down`: things that are slow to make and the same for every cluster.
func (c Config) CacheDir() string { return c.data("cache") }

// StateDirs are the directories below DataDir that make up a cluster: `down` removes all of them.
func (c Config) StateDirs() []string {
	return []string{
		c.ContainerdRoot(), c.data("etcd"), c.KubeletDir(), c.PodLogDir(), c.PKIDir(), c.ClientDir(),
		c.data("conf"), c.data("log"), c.data("cni"), c.Kubeconfig(),
	}
}

// Kubeconfig is the administrator's.
func (c Config) Kubeconfig() string { return c.data("kubeconfig") }

// ClientDir holds the Fast Sandbox identity of the person at this machine: ca.crt, tls.crt, tls.key.
func (c Config) ClientDir() string { return c.data("client") }

// PKIDir holds the certificates of Kubernetes, SandboxPKIDir those of Fast Sandbox.
func (c Config) PKIDir() string { return c.data("pki") }

// SandboxPKIDir holds the certificates of Fast Sandbox.
func (c Config) SandboxPKIDir() string { return c.data("pki", "fast-sandbox") }

// KubeletDir is the kubelet's root directory.
func (c Config) KubeletDir() string { return c.data("kubelet") }

// PodLogDir holds the output of Pods.
func (c Config) PodLogDir() string { return c.data("pods") }

// LogFile is where a component's output goes.
func (c Config) LogFile(component string) string { return c.data("log", component+".log") }

// PIDFile is the record of a component's process.
func (c Config) PIDFile(component string) string { return c.run("pid", component) }

// SupervisorLock is held by the supervisor for as long as it lives.
func (c Config) SupervisorLock() string { return c.run("supervisor.lock") }

// ConfigFile keeps this Config for the supervisor and for later commands.
func (c Config) ConfigFile() string { return c.run("cluster.json") }

// NetworkState records what `down` must restore in the machine's network.
func (c Config) NetworkState() string { return c.run("network.json") }

// CA is the certificate authority of Kubernetes.
func (c Config) CA() string { return c.certificate(AuthorityCluster).Cert }

func (c Config) certificate(name string) pki.Files {
	return pki.Files{Cert: filepath.Join(c.PKIDir(), name+".crt"), Key: filepath.Join(c.PKIDir(), name+".key")}
}

func (c Config) conf(name string) string { return c.data("conf", name) }
