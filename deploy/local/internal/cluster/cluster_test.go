package cluster_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/cluster"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func config(t *testing.T) components.Config {
	t.Helper()
	dir := t.TempDir()
	c := components.Config{
		BinDir: filepath.Join(dir, "bin"), DataDir: filepath.Join(dir, "data"), RunDir: filepath.Join(dir, "run"),
		CNIDir: "/usr/lib/cni", ResolvConf: "/etc/resolv.conf",
	}
	for _, component := range c.All() {
		require.NoError(t, os.MkdirAll(filepath.Dir(component.Path), 0o755))
		require.NoError(t, os.WriteFile(component.Path, nil, 0o755))
	}
	return c
}

// Everything that running components depend on changes the generation, and nothing else does.
func TestGeneration(t *testing.T) {
	c, now := config(t), time.Now()
	generation := func() string {
		require.NoError(t, cluster.EnsurePKI(c, now))
		generation, err := cluster.WriteFiles(c)
		require.NoError(t, err)
		return generation
	}
	first := generation()
	require.Equal(t, first, generation())

	require.NoError(t, os.WriteFile(c.Binary(), []byte("newer"), 0o755))
	rebuilt := generation()
	require.NotEqual(t, first, rebuilt)

	now = now.AddDate(0, 11, 20)
	renewed := generation()
	require.NotEqual(t, rebuilt, renewed)

	c.NoSysResource = true
	require.NotEqual(t, renewed, generation())
	info, err := os.Stat(c.Kubeconfig())
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
}

func TestOurs(t *testing.T) {
	c := config(t)
	shim := func(address string) host.Info {
		return host.Info{
			Exe: "/x/containerd-shim-runc-v2", Args: []string{"/x/containerd-shim-runc-v2", "-namespace", "k8s.io", "-address", address}, Cgroups: []string{"/"},
		}
	}
	namesake, container := shim(c.ContainerdSocket()), shim(c.ContainerdSocket())
	namesake.Exe, container.Nested = "/bin/sleep", true
	require.True(t, cluster.Ours(c, host.Info{Cgroups: []string{"/", "/fsb-local/system"}}))
	require.True(t, cluster.Ours(c, shim(c.ContainerdSocket())))
	require.False(t, cluster.Ours(c, shim("/run/containerd/containerd.sock")), "the shim of another containerd")
	require.False(t, cluster.Ours(c, namesake), "a process that calls itself a shim")
	require.False(t, cluster.Ours(c, container), "a container that executes a file of the shim's name")
	require.False(t, cluster.Ours(c, host.Info{Exe: "/bin/grep", Args: []string{"grep", "-address", c.ContainerdSocket()}}), "a process that only mentions the socket")
	require.False(t, cluster.Ours(c, host.Info{Args: []string{"kubelet"}, Cgroups: []string{"/fsb-local-other"}}))
	require.False(t, cluster.Ours(c, host.Info{}))
}

// Components and the supervisor are found by their program, also when it was replaced meanwhile by a build, and by their cgroup.
func TestLeftComponents(t *testing.T) {
	c := config(t)
	system := []string{"/fsb-local/system"}
	tests := map[string]struct {
		info                  host.Info
		component, supervisor bool
	}{
		"etcd":                    {info: host.Info{Exe: "/x/fsb-local", Args: []string{"etcd"}, Cgroups: system}, component: true},
		"containerd":              {info: host.Info{Exe: "/x/containerd/containerd", Args: []string{"containerd"}, Cgroups: system}, component: true},
		"supervisor":              {info: host.Info{Exe: "/x/fsb-local", Args: []string{"/x/fsb-local", "supervise"}, Cgroups: system}, supervisor: true},
		"a shim":                  {info: host.Info{Exe: "/x/containerd/containerd-shim-runc-v2", Args: []string{"containerd"}, Cgroups: system}},
		"another program":         {info: host.Info{Exe: "/bin/sleep", Args: []string{"etcd", "supervise"}, Cgroups: system}},
		"another cluster's":       {info: host.Info{Exe: "/x/fsb-local", Args: []string{"etcd", "supervise"}, Cgroups: []string{"/other"}}},
		"a container in a cgroup": {info: host.Info{Exe: "/x/fsb-local", Args: []string{"etcd", "supervise"}, Cgroups: system, Nested: true}},
		"no command line":         {info: host.Info{Exe: "/x/fsb-local", Cgroups: system}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, test.component, cluster.IsComponent(c, test.info))
			require.Equal(t, test.supervisor, cluster.IsSupervisor(c, test.info))
		})
	}
}

func TestAncestors(t *testing.T) {
	member := func(pid, ppid int) host.Info { return host.Info{Process: host.Process{PID: pid}, PPID: ppid} }
	all := []host.Info{member(1, 0), member(2, 1), member(3, 2), member(4, 2)}
	require.Equal(t, map[int]bool{3: true, 2: true, 1: true}, cluster.Ancestors(all, 3))
}

// Containers are found by the state that containerd recorded, whether they run or not.
func TestRemains(t *testing.T) {
	c := config(t)
	write := func(id, spec string) {
		dir := filepath.Join(c.ContainerdState(), "io.containerd.runtime.v2.task", id)
		require.NoError(t, os.MkdirAll(dir, 0o755))
		if spec != "" {
			require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(spec), 0o644))
		}
	}
	write("k8s.io/pod", `{"linux":{"cgroupsPath":"/fsb-local/kubepods/x"}}`)
	write("k8s.io/raw", `{"linux":{"cgroupsPath":"/k8s.io/raw"}}`)
	write("default/tricky", `{"linux":{"cgroupsPath":"../../"}}`)
	write("default/half", `{"lin`)
	write("default/none", "")
	tasks, cgroups := cluster.Remains(c)
	require.ElementsMatch(t, []string{"k8s.io/pod", "k8s.io/raw", "default/tricky", "default/half", "default/none"}, tasks)
	require.Equal(t, []string{"/k8s.io/raw"}, cgroups)
}

// Shells and tests depend on these names and values.
func TestEnvironment(t *testing.T) {
	c := components.Config{DataDir: "/var/lib/fsb-local", RunDir: "/run/fsb-local"}
	require.Equal(t, [][2]string{
		{"KUBECONFIG", "/var/lib/fsb-local/kubeconfig"},
		{"FSB_ADDR", "10.200.0.2:30090"},
		{"FSB_GATEWAY", "https://10.200.0.2:30080"},
		{"FSB_ALLOCATOR", "10.200.0.2:30091"},
		{"FSB_CACERT", "/var/lib/fsb-local/client/ca.crt"},
		{"FSB_CERT", "/var/lib/fsb-local/client/tls.crt"},
		{"FSB_KEY", "/var/lib/fsb-local/client/tls.key"},
		{"FSB_JAEGER_ADDRESS", "http://10.200.0.2:16686"},
		{"CONTAINERD_ADDRESS", "/run/fsb-local/containerd/containerd.sock"},
	}, cluster.Environment(c))
}

func TestLoadConfig(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cluster.json")
	_, err := cluster.LoadConfig(path)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.WriteFile(path, []byte(`{"binDir": "/a/bin", "dataDir": "/a/data", "runDir": "relative"}`), 0o644))
	_, err = cluster.LoadConfig(path)
	require.ErrorContains(t, err, "--run-dir")
	require.NoError(t, os.WriteFile(path, []byte(`{"binDir": "/a/bin", "dataDir": "/a/data", "runDir": "/a/run"}`), 0o644))
	c, err := cluster.LoadConfig(path)
	require.NoError(t, err)
	require.Equal(t, "/a/run", c.RunDir)
}

// The garbage collector of a running cluster is kept.
func TestCollects(t *testing.T) {
	c := config(t)
	require.False(t, cluster.Collects(c), "there is no cluster")
	for _, own := range []bool{true, false} {
		c.OwnGC = own
		require.NoError(t, cluster.EnsurePKI(c, time.Now()))
		_, err := cluster.WriteFiles(c)
		require.NoError(t, err)
		bare := c
		bare.OwnGC = false
		require.Equal(t, own, cluster.Collects(bare))
	}
}

// A later `up` keeps the trace store. The name is short: the directory of a test is part of a path of 38 characters at most.
func TestTraces(t *testing.T) {
	c := config(t)
	require.False(t, cluster.HasTraces(c), "there is no cluster")
	c.Traces = true
	require.NoError(t, os.MkdirAll(filepath.Dir(c.JaegerBinary()), 0o755))
	require.NoError(t, os.WriteFile(c.JaegerBinary(), nil, 0o755))
	require.NoError(t, cluster.EnsurePKI(c, time.Now()))
	_, err := cluster.WriteFiles(c)
	require.NoError(t, err)
	c.Traces = false
	require.True(t, cluster.HasTraces(c))
}

// Down removes everything that the cluster wrote, logs included, except its caches; purge removes these too.
func TestDownKeepsOnlyCaches(t *testing.T) {
	c := config(t)
	cache := []string{c.CacheDir(), filepath.Join(c.DataDir, "certs.d")}
	paths := cluster.OwnPaths(c, false)
	for _, path := range []string{components.AgentLogDir, components.AgentSlotDir, c.RunDir, c.ContainerdRoot(), filepath.Dir(c.LogFile("x"))} {
		require.Contains(t, paths, path)
	}
	for _, path := range cache {
		require.NotContains(t, paths, path)
		require.Contains(t, cluster.OwnPaths(c, true), path)
	}
	require.Empty(t, cluster.Kept(c))
	require.NoError(t, os.MkdirAll(c.CacheDir(), 0o755))
	require.Equal(t, cache[:1], cluster.Kept(c), "what is kept is named")
}

func TestFind(t *testing.T) {
	_, err := cluster.Find(config(t), "kubelett")
	require.ErrorContains(t, err, "kube-apiserver")
	component, err := cluster.Find(config(t), "kubelet")
	require.NoError(t, err)
	require.Equal(t, "kubelet", component.Name)
}

func TestPrint(t *testing.T) {
	status := cluster.Status{
		Components: []cluster.ComponentStatus{
			{Name: "etcd", PID: 12, Healthy: true, Uptime: 3661.5}, {Name: "kubelet", Problem: "not running"},
		},
		Node: cluster.NodeStatus{Name: "fsb-local", Address: "10.200.0.2"}, Pods: cluster.PodCounts{Total: 3, Ready: 2},
	}
	var out bytes.Buffer
	require.NoError(t, status.Print(&out))
	lines := strings.Split(out.String(), "\n")
	require.Equal(t, []string{"etcd", "12", "true", "1h1m1s", "0"}, strings.Fields(lines[1]))
	require.Contains(t, lines[2], "not running")
	require.Contains(t, out.String(), "pods: 3, of which 2 ready")
}

// A cluster that does not exist is unhealthy; that is not an error.
func TestInspectWithoutCluster(t *testing.T) {
	status := cluster.Inspect(t.Context(), config(t), time.Now())
	require.False(t, status.Healthy)
	require.Len(t, status.Components, 8)
	for _, component := range status.Components {
		require.False(t, component.Healthy)
		require.Equal(t, "not running", component.Problem)
	}
	require.NotEmpty(t, status.Node.Problem)
}
