package components

import (
	"time"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/network"
)

const (
	etcdURL       = "https://127.0.0.1:2379"
	etcdPeerURL   = "http://127.0.0.1:2380"
	etcdHealthURL = "http://127.0.0.1:2381"
	issuer        = "https://kubernetes.default.svc"
)

func etcd(c Config) Component {
	certificate := c.certificate(Etcd)
	return Component{
		Name: Etcd, Path: c.Binary(), Grace: 5 * time.Second,
		Probe: Probe{URL: etcdHealthURL + "/readyz"},
		Args: []string{
			"--name=" + NodeName,
			"--data-dir=" + c.data("etcd"),
			"--listen-client-urls=" + etcdURL,
			"--advertise-client-urls=" + etcdURL,
			"--listen-peer-urls=" + etcdPeerURL,
			"--initial-advertise-peer-urls=" + etcdPeerURL,
			"--initial-cluster=" + NodeName + "=" + etcdPeerURL,
			"--listen-metrics-urls=" + etcdHealthURL,
			"--cert-file=" + certificate.Cert,
			"--key-file=" + certificate.Key,
			"--trusted-ca-file=" + c.CA(),
			"--client-cert-auth=true",
			// A development cluster may lose its last seconds with the power. It loses nothing when etcd is killed, and
			// every write is several milliseconds faster.
			"--unsafe-no-fsync=true",
			"--auto-compaction-retention=1h",
			"--log-level=warn",
		},
	}
}

func apiServer(c Config) Component {
	serving, etcd, kubelet := c.certificate(APIServer), c.certificate("apiserver-etcd"), c.certificate("apiserver-kubelet")
	frontProxy := c.certificate(userFrontProxy)
	return Component{
		Name: APIServer, Path: c.Binary(), After: []string{Etcd}, Grace: 2 * time.Second,
		Probe: Probe{URL: APIServerURL() + "/readyz"},
		Args: []string{
			"--advertise-address=" + network.NodeIP,
			"--secure-port=6443",
			"--etcd-servers=" + etcdURL,
			"--etcd-cafile=" + c.CA(),
			"--etcd-certfile=" + etcd.Cert,
			"--etcd-keyfile=" + etcd.Key,
			"--client-ca-file=" + c.CA(),
			"--tls-cert-file=" + serving.Cert,
			"--tls-private-key-file=" + serving.Key,
			"--kubelet-certificate-authority=" + c.CA(),
			"--kubelet-client-certificate=" + kubelet.Cert,
			"--kubelet-client-key=" + kubelet.Key,
			"--kubelet-preferred-address-types=InternalIP",
			"--requestheader-client-ca-file=" + c.certificate(AuthorityFrontProxy).Cert,
			"--requestheader-allowed-names=" + userFrontProxy,
			"--requestheader-extra-headers-prefix=X-Remote-Extra-",
			"--requestheader-group-headers=X-Remote-Group",
			"--requestheader-username-headers=X-Remote-User",
			"--proxy-client-cert-file=" + frontProxy.Cert,
			"--proxy-client-key-file=" + frontProxy.Key,
			"--authorization-mode=Node,RBAC",
			"--enable-admission-plugins=NodeRestriction",
			"--service-account-issuer=" + issuer,
			"--service-account-key-file=" + c.SigningKey().Cert,
			"--service-account-signing-key-file=" + c.SigningKey().Key,
			"--service-cluster-ip-range=" + network.ServiceCIDR,
			"--allow-privileged=true",
			"--profiling=false",
		},
	}
}

func controllerManager(c Config) Component {
	controllers := "*"
	if c.OwnGC {
		controllers += ",-garbage-collector-controller,-pod-garbage-collector-controller"
	}
	serving := c.certificate(ControllerManager)
	return Component{
		Name: ControllerManager, Path: c.Binary(), After: []string{APIServer}, Grace: 3 * time.Second,
		Probe: Probe{URL: "https://127.0.0.1:10257/healthz"},
		Args: []string{
			"--kubeconfig=" + c.conf(ControllerManager+".kubeconfig"),
			"--authentication-kubeconfig=" + c.conf(ControllerManager+".kubeconfig"),
			"--authorization-kubeconfig=" + c.conf(ControllerManager+".kubeconfig"),
			"--controllers=" + controllers,
			"--bind-address=127.0.0.1",
			"--tls-cert-file=" + serving.Cert,
			"--tls-private-key-file=" + serving.Key,
			"--client-ca-file=" + c.CA(),
			"--root-ca-file=" + c.CA(),
			"--cluster-signing-cert-file=" + c.CA(),
			"--cluster-signing-key-file=" + c.certificate(AuthorityCluster).Key,
			"--service-account-private-key-file=" + c.SigningKey().Key,
			"--use-service-account-credentials=true",
			"--allocate-node-cidrs=true",
			"--cluster-cidr=" + network.PodCIDR,
			"--node-cidr-mask-size=16", // one node, all of it
			"--service-cluster-ip-range=" + network.ServiceCIDR,
			"--leader-elect=false",
			// Every controller fetches a token of its own at the start; under the usual limit that takes four seconds.
			"--kube-api-qps=200",
			"--kube-api-burst=400",
			"--profiling=false",
		},
	}
}

func scheduler(c Config) Component {
	serving := c.certificate(Scheduler)
	return Component{
		Name: Scheduler, Path: c.Binary(), After: []string{APIServer}, Grace: 3 * time.Second,
		Probe: Probe{URL: "https://127.0.0.1:10259/healthz"},
		Args: []string{
			"--kubeconfig=" + c.conf(Scheduler+".kubeconfig"),
			"--authentication-kubeconfig=" + c.conf(Scheduler+".kubeconfig"),
			"--authorization-kubeconfig=" + c.conf(Scheduler+".kubeconfig"),
			"--bind-address=127.0.0.1",
			"--tls-cert-file=" + serving.Cert,
			"--tls-private-key-file=" + serving.Key,
			"--client-ca-file=" + c.CA(),
			"--leader-elect=false",
			"--profiling=false",
		},
	}
}
