package components

import (
	"fmt"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	proxyconfig "k8s.io/kube-proxy/config/v1alpha1"
	kubeletconfig "k8s.io/kubelet/config/v1beta1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/network"
)

func kubelet(c Config) Component {
	return Component{
		Name: Kubelet, Path: c.Binary(), After: []string{Containerd, APIServer}, Grace: 5 * time.Second,
		Probe: Probe{URL: "http://127.0.0.1:10248/healthz"},
		Args: []string{
			"--config=" + c.conf("kubelet.yaml"),
			"--kubeconfig=" + c.conf(Kubelet+".kubeconfig"),
			"--hostname-override=" + NodeName,
			"--node-ip=" + network.NodeIP,
			"--root-dir=" + c.KubeletDir(),
			"--cert-dir=" + filepath.Join(c.KubeletDir(), "pki"),
		},
	}
}

func (c Config) kubeletFiles() ([]File, error) {
	serving := c.certificate(Kubelet)
	config := kubeletconfig.KubeletConfiguration{
		TypeMeta: metav1.TypeMeta{APIVersion: kubeletconfig.SchemeGroupVersion.String(), Kind: "KubeletConfiguration"},
		Authentication: kubeletconfig.KubeletAuthentication{
			X509:      kubeletconfig.KubeletX509Authentication{ClientCAFile: c.CA()},
			Anonymous: kubeletconfig.KubeletAnonymousAuthentication{Enabled: ptr.To(false)},
			Webhook:   kubeletconfig.KubeletWebhookAuthentication{Enabled: ptr.To(true)},
		},
		Authorization:            kubeletconfig.KubeletAuthorization{Mode: kubeletconfig.KubeletAuthorizationModeWebhook},
		TLSCertFile:              serving.Cert,
		TLSPrivateKeyFile:        serving.Key,
		ContainerRuntimeEndpoint: "unix://" + c.ContainerdSocket(),
		ResolverConfig:           ptr.To(c.ResolvConf),
		PodLogsDir:               c.PodLogDir(),
		VolumePluginDir:          filepath.Join(c.KubeletDir(), "volume-plugins"),
		ClusterDomain:            "cluster.local",
		MaxPods:                  250,
		SerializeImagePulls:      ptr.To(false),
		CgroupDriver:             "cgroupfs",
		// Everything of ours in one tree, apart from another kubelet's kubepods.
		CgroupRoot:   RootCgroup,
		FailCgroupV1: ptr.To(false),
		FailSwapOn:   ptr.To(false),
		// An empty list would be taken for "unset" and mean "pods".
		EnforceNodeAllocatable: []string{"none"},
		MakeIPTablesUtilChains: ptr.To(false),
		// A developer's disk is often nearly full, and our images come from no registry: evicting or collecting them
		// would only break the cluster.
		EvictionHard: map[string]string{
			"memory.available": "50Mi", "nodefs.available": "1%", "nodefs.inodesFree": "1%", "imagefs.available": "1%",
		},
		ImageGCHighThresholdPercent: ptr.To[int32](100),
		OOMScoreAdj:                 c.oomScore(-999),
		// What tests kill, again and again, is to be back at once: the usual delay grows to five minutes. The kubelet tries at once
		// and a second later, and after that not before 10 s, so that any delay above a second is one of 10 s.
		FeatureGates:     map[string]bool{"KubeletCrashLoopBackOffMax": true},
		CrashLoopBackOff: kubeletconfig.CrashLoopBackOffConfig{MaxContainerRestartPeriod: &metav1.Duration{Duration: time.Second}},
	}
	raw, err := yaml.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("rendering the configuration of the kubelet: %w", err)
	}
	return []File{{Path: c.conf("kubelet.yaml"), Content: raw}}, nil
}

func proxy(c Config) Component {
	return Component{
		Name: Proxy, Path: c.Binary(), After: []string{APIServer}, Grace: 3 * time.Second,
		Probe: Probe{URL: "http://127.0.0.1:10256/livez"},
		Args:  []string{"--config=" + c.conf("kube-proxy.yaml")},
	}
}

func (c Config) proxyFiles() ([]File, error) {
	config := proxyconfig.KubeProxyConfiguration{
		TypeMeta:           metav1.TypeMeta{APIVersion: proxyconfig.SchemeGroupVersion.String(), Kind: "KubeProxyConfiguration"},
		Mode:               "nftables",
		HostnameOverride:   NodeName,
		ClusterCIDR:        network.PodCIDR,
		DetectLocalMode:    "ClusterCIDR",
		HealthzBindAddress: "127.0.0.1:10256",
		MetricsBindAddress: "127.0.0.1:10249",
		OOMScoreAdj:        c.oomScore(-999),
		// A Service follows its Pods at once; the usual second is for clusters with thousands.
		NFTables: proxyconfig.KubeProxyNFTablesConfiguration{MinSyncPeriod: metav1.Duration{Duration: 100 * time.Millisecond}},
		// The size of the connection table is the whole machine's, not ours to set.
		Conntrack: proxyconfig.KubeProxyConntrackConfiguration{
			MaxPerCore:            ptr.To[int32](0),
			Min:                   ptr.To[int32](0),
			TCPEstablishedTimeout: &metav1.Duration{},
			TCPCloseWaitTimeout:   &metav1.Duration{},
		},
	}
	config.ClientConnection.Kubeconfig = c.conf(Proxy + ".kubeconfig")
	raw, err := yaml.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("rendering the configuration of kube-proxy: %w", err)
	}
	return []File{{Path: c.conf("kube-proxy.yaml"), Content: raw}}, nil
}

// oomScore is the wanted score where the machine lets us lower one, and the kernel's default elsewhere.
func (c Config) oomScore(wanted int32) *int32 {
	if c.NoSysResource {
		wanted = 0
	}
	return &wanted
}
