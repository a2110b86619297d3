package components

import (
	"fmt"
	"net"
	"path/filepath"
	"time"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/network"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/pki"
)

// The components, in no order.
const (
	Containerd        = "containerd"
	Etcd              = "etcd"
	APIServer         = "kube-apiserver"
	ControllerManager = "kube-controller-manager"
	Scheduler         = "kube-scheduler"
	Kubelet           = "kubelet"
	Proxy             = "kube-proxy"
	// Jaeger is the trace store, which runs only with Config.Traces.
	Jaeger = "jaeger"
)

// Component is one supervised program.
type Component struct {
	Name string
	// Path is the program; Args are its arguments after its own name.
	Path string
	Args []string
	// Env is added to the environment of all components, as NAME=VALUE.
	Env []string
	// After names the components that must be ready before this one is started for the first time.
	After []string
	// Probe is the component's health check.
	Probe Probe
	// Grace is how long it may take to end before it is killed.
	Grace time.Duration
}

// Probe is an HTTP GET from inside the cluster's network namespace that answers 200, or, with Socket, a gRPC health
// check on a unix socket.
type Probe struct {
	URL    string
	Socket string
}

// File is a configuration file.
type File struct {
	Path    string
	Content []byte
}

// The certificate authorities of Kubernetes. The second one identifies the API server to extension API servers.
// If it were the first, every client could impersonate any user there.
const (
	AuthorityCluster    = "ca"
	AuthorityFrontProxy = "front-proxy-ca"
)

// Certificate is a certificate that one of the cluster's authorities signs.
type Certificate struct {
	Authority string
	Files     pki.Files
	Subject   pki.Subject
}

// All lists the components in the order in which they are started. They are stopped in reverse.
func (c Config) All() []Component {
	all := []Component{
		containerd(c), etcd(c), apiServer(c), controllerManager(c), scheduler(c), kubelet(c), proxy(c),
	}
	if c.Traces {
		all = append(all, jaeger(c))
	}
	return all
}

// Files renders every configuration file. The certificates that they point to need not exist yet.
func (c Config) Files() ([]File, error) {
	var files []File
	for _, render := range []func() ([]File, error){c.containerdFiles, c.kubeconfigs, c.kubeletFiles, c.proxyFiles} {
		some, err := render()
		if err != nil {
			return nil, err
		}
		files = append(files, some...)
	}
	return files, nil
}

// The names that Kubernetes' own RBAC bootstrap policy binds roles to.
const (
	userControllerManager = "system:kube-controller-manager"
	userScheduler         = "system:kube-scheduler"
	userProxy             = "system:kube-proxy"
	userNode              = "system:node:" + NodeName
	groupNodes            = "system:nodes"
	groupMasters          = "system:masters"
	userFrontProxy        = "front-proxy-client"
	admin                 = "admin"
)

// SigningKey is the key pair of service account tokens.
func (c Config) SigningKey() pki.Files {
	return pki.Files{Cert: filepath.Join(c.PKIDir(), "sa.pub"), Key: filepath.Join(c.PKIDir(), "sa.key")}
}

// Certificates lists every certificate of the cluster.
func (c Config) Certificates() []Certificate {
	node, loopback := net.ParseIP(network.NodeIP), net.ParseIP("127.0.0.1")
	server := func(name string, subject pki.Subject, ips ...net.IP) Certificate {
		subject.DNS = append([]string{"localhost", NodeName}, subject.DNS...)
		subject.IPs = append(ips, loopback)
		return Certificate{Authority: AuthorityCluster, Files: c.certificate(name), Subject: subject}
	}
	client := func(name, user string, groups ...string) Certificate {
		return Certificate{Authority: AuthorityCluster, Files: c.certificate(name),
			Subject: pki.Subject{CommonName: user, Organization: groups}}
	}
	return []Certificate{
		server(Etcd, pki.Subject{CommonName: Etcd}),
		client("apiserver-etcd", APIServer),
		server(APIServer, pki.Subject{CommonName: APIServer, DNS: []string{
			"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
		}}, node, net.ParseIP(network.HostIP), net.ParseIP(network.APIServerIP)),
		client("apiserver-kubelet", "kube-apiserver-kubelet-client", groupMasters),
		server(ControllerManager, pki.Subject{CommonName: userControllerManager}),
		server(Scheduler, pki.Subject{CommonName: userScheduler}),
		server(Kubelet, pki.Subject{CommonName: userNode, Organization: []string{groupNodes}}, node),
		client(Proxy, userProxy),
		client(admin, admin, groupMasters),
		{Authority: AuthorityFrontProxy, Files: c.certificate(userFrontProxy), Subject: pki.Subject{CommonName: userFrontProxy}},
	}
}

// APIServerURL is where the apiserver is reached, from the machine, the node and Pods alike.
func APIServerURL() string { return fmt.Sprintf("https://%s:6443", network.NodeIP) }
