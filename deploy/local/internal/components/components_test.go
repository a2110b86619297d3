package components_test

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/client-go/tools/clientcmd"
	kubeletconfig "k8s.io/kubelet/config/v1beta1"
	"sigs.k8s.io/yaml"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
)

func config() components.Config {
	return components.Config{
		BinDir: "/src/bin", DataDir: "/var/lib/fsb-local", RunDir: "/run/fsb-local", CNIDir: "/usr/lib/cni",
		ResolvConf: "/etc/resolv.conf",
	}
}

func TestValidate(t *testing.T) {
	require.NoError(t, config().Validate())
	bad := components.Config{BinDir: "bin", DataDir: "/home", RunDir: "/" + strings.Repeat("long/", 10) + "run"}
	err := bad.Validate()
	require.ErrorContains(t, err, `--bin-dir: "bin"`)
	require.ErrorContains(t, err, `--data-dir: "/home"`)
	require.ErrorContains(t, err, "too long for unix sockets")
}

// Agents mount these paths from the node, and other programs have them written down.
func TestContracts(t *testing.T) {
	require.Equal(t, "/run/fsb-local/containerd/containerd.sock", config().ContainerdSocket())
	require.Equal(t, "/var/lib/fsb-local/containerd", config().ContainerdRoot())
	require.Equal(t, "/run/fsb-local/containerd", config().ContainerdState())
	require.Equal(t, "/var/log/fast-sandbox", components.AgentLogDir)
	require.Equal(t, "/var/lib/fast-sandbox/slots", components.AgentSlotDir)
	require.Equal(t, "fsb-local", components.NodeName)
	require.Equal(t, "/var/lib/fsb-local/kubeconfig", config().Kubeconfig())
}

// Every component starts after those that it names, and writes only into files of its own.
func TestAll(t *testing.T) {
	started := make(map[string]bool)
	for _, component := range config().All() {
		for _, name := range component.After {
			require.True(t, started[name], "%s is to start after %s", component.Name, name)
		}
		require.False(t, started[component.Name])
		started[component.Name] = true
		require.True(t, strings.HasPrefix(component.Path, "/src/bin/"))
		require.Positive(t, component.Grace)
		require.True(t, (component.Probe.URL == "") != (component.Probe.Socket == ""), "one kind of probe")
	}
	require.Len(t, started, 7)
}

// The trace store is one more component, and receives spans where containerd sends them.
func TestTraces(t *testing.T) {
	c := config()
	c.Traces = true
	all := c.All()
	require.Len(t, all, 8)
	require.Equal(t, components.Jaeger, all[7].Name)
	require.Contains(t, all[7].Args, "--collector.otlp.http.host-port=10.200.0.2:4318")
	require.Contains(t, all[7].Args, "--query.http-server.host-port="+strings.TrimPrefix(components.JaegerURL(), "http://"))
	require.Equal(t, components.Containerd, all[0].Name)
	require.Contains(t, all[0].Env, "OTEL_EXPORTER_OTLP_ENDPOINT="+components.OTLPEndpoint())
	require.Contains(t, all[0].Env, "OTEL_TRACES_SAMPLER_ARG=0", "the kubelet's polls must not be traced")
}

// Exactly one collects garbage: kube-controller-manager does in a bare cluster, Fast Sandbox where it is installed.
func TestGarbageCollectors(t *testing.T) {
	controllers := func(c components.Config) (found []string) {
		for _, component := range c.All() {
			for _, argument := range component.Args {
				if value, ok := strings.CutPrefix(argument, "--controllers="); ok {
					require.Equal(t, components.ControllerManager, component.Name)
					found = append(found, strings.Split(value, ",")...)
				}
			}
		}
		return found
	}
	require.Equal(t, []string{"*"}, controllers(config()))
	ours := config()
	ours.OwnGC = true
	require.Equal(t, []string{"*", "-garbage-collector-controller", "-pod-garbage-collector-controller"}, controllers(ours))
}

// Every file that a component is pointed to by an argument is one that is rendered, or a certificate.
func TestArgumentsNameExistingFiles(t *testing.T) {
	c := config()
	known := make(map[string]bool)
	files, err := c.Files()
	require.NoError(t, err)
	for _, file := range files {
		require.False(t, known[file.Path], file.Path)
		known[file.Path] = true
	}
	for _, certificate := range c.Certificates() {
		require.False(t, known[certificate.Files.Cert], certificate.Files.Cert)
		known[certificate.Files.Cert], known[certificate.Files.Key] = true, true
	}
	for _, authority := range []string{components.AuthorityCluster, components.AuthorityFrontProxy} {
		known[filepath.Join(c.PKIDir(), authority+".crt")] = true
		known[filepath.Join(c.PKIDir(), authority+".key")] = true
	}
	known[c.SigningKey().Cert], known[c.SigningKey().Key] = true, true
	for _, component := range c.All() {
		for _, argument := range component.Args {
			value := argument[strings.Index(argument, "=")+1:]
			directory := strings.Contains(argument, "-dir=")
			if strings.HasPrefix(value, c.DataDir) && !directory {
				require.True(t, known[value], "%s %s", component.Name, argument)
			}
		}
	}
}

func TestKubeletFile(t *testing.T) {
	files, err := config().Files()
	require.NoError(t, err)
	var kubelet kubeletconfig.KubeletConfiguration
	for _, file := range files {
		if filepath.Base(file.Path) == "kubelet.yaml" {
			require.NoError(t, yaml.Unmarshal(file.Content, &kubelet))
		}
	}
	require.False(t, *kubelet.FailCgroupV1)
	require.False(t, *kubelet.FailSwapOn)
	require.Equal(t, []string{"none"}, kubelet.EnforceNodeAllocatable, "an empty list would not survive")
	require.Equal(t, components.RootCgroup, kubelet.CgroupRoot)
	require.EqualValues(t, 250, kubelet.MaxPods)
	require.EqualValues(t, -999, *kubelet.OOMScoreAdj)
}

func TestWithoutSysResource(t *testing.T) {
	c := config()
	c.NoSysResource = true
	files, err := c.Files()
	require.NoError(t, err)
	var found int
	for _, file := range files {
		switch filepath.Base(file.Path) {
		case "containerd.toml":
			require.Contains(t, string(file.Content), "restrict_oom_score_adj = true")
			found++
		case "kubelet.yaml", "kube-proxy.yaml":
			require.Contains(t, string(file.Content), "oomScoreAdj: 0")
			found++
		}
	}
	require.Equal(t, 3, found)
}

func TestAdminKubeconfig(t *testing.T) {
	c := config()
	c.DataDir = filepath.Join(t.TempDir(), "data")
	_, err := c.AdminKubeconfig()
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.MkdirAll(c.PKIDir(), 0o755))
	for _, name := range []string{"ca.crt", "admin.crt", "admin.key"} {
		require.NoError(t, os.WriteFile(filepath.Join(c.PKIDir(), name), []byte(name), 0o600))
	}
	raw, err := c.AdminKubeconfig()
	require.NoError(t, err)
	client, err := clientcmd.RESTConfigFromKubeConfig(raw)
	require.NoError(t, err)
	require.Equal(t, components.APIServerURL(), client.Host)
	require.Equal(t, "admin.key", string(client.KeyData))
}

func TestReason(t *testing.T) {
	require.Equal(t, "[-]etcd failed: reason withheld, [-]x failed",
		components.Reason("[+]ping ok\n[-]etcd failed: reason withheld\n[-]x failed\nreadyz check failed\n"))
	require.Equal(t, "not found", components.Reason("not found\n"))
	require.Empty(t, components.Reason(""))
}

// Without the namespace a check fails: it must not reach a server on the machine's own loopback.
func TestCheckStaysInside(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer server.Close()
	require.Error(t, config().Check(t.Context(), components.Probe{URL: server.URL}))
}
