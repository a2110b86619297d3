//go:build integration

package ctrd_test

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// run runs a command to its end and returns its output.
func run(t *testing.T, s *containerd.Server, r *ctrd.Runtime, change func(*runtime.Container), script string) string {
	t.Helper()
	id := uuid.NewString() + "-1"
	dir := filepath.Join(s.LogRoot, id)
	require.NoError(t, os.MkdirAll(dir, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "output.log"), nil, 0o600))
	record, err := anypb.New(durationpb.New(1))
	require.NoError(t, err)
	c := runtime.Container{
		ID: id, Image: containerd.Busybox, Command: []string{"sh", "-c", script}, Record: record, Hostname: "box",
		LogPath: filepath.Join(dir, "output.log"), Network: runtime.NetworkNone,
	}
	if change != nil {
		change(&c)
	}
	require.NoError(t, r.Create(t.Context(), c, func(runtime.Stage) {}))
	require.NoError(t, r.Start(t.Context(), id))
	_, err = r.Wait(t.Context(), id)
	require.NoError(t, err)
	require.NoError(t, r.Finish(t.Context(), id, record))
	out, err := os.ReadFile(c.LogPath)
	require.NoError(t, err)
	require.NoError(t, r.Delete(t.Context(), id))
	return string(out)
}

// TestPodIsFound creates the containers that the CRI plugin creates for an agent's Pod, and joins the Pod.
func TestPodIsFound(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	ctx := t.Context()
	img, err := s.Client.GetImage(ctx, containerd.Busybox)
	require.NoError(t, err)
	hosts, resolv := filepath.Join(s.Dir, "hosts"), filepath.Join(s.Dir, "resolv.conf")
	require.NoError(t, os.WriteFile(hosts, []byte("10.1.2.3 podhost\n"), 0o644))
	require.NoError(t, os.WriteFile(resolv, []byte("nameserver 10.9.9.9\n"), 0o644))
	pod := s.CgroupParent + "/pod1"
	defer s.RemoveCgroup("pod1")
	sandbox, err := s.Client.NewContainer(ctx, "sandbox", client.WithNewSnapshot("sandbox", img),
		client.WithContainerLabels(map[string]string{"io.kubernetes.pod.uid": "pod-1", "io.cri-containerd.kind": "sandbox"}),
		client.WithNewSpec(oci.WithImageConfig(img), oci.WithProcessArgs("sleep", "1000"), oci.WithCgroup(pod+"/sandbox")))
	require.NoError(t, err)
	defer func() { require.NoError(t, sandbox.Delete(ctx, client.WithSnapshotCleanup)) }()
	agent, err := s.Client.NewContainer(ctx, "agent", client.WithNewSnapshot("agent", img),
		client.WithContainerLabels(map[string]string{
			"io.kubernetes.pod.uid": "pod-1", "io.cri-containerd.kind": "container", "io.kubernetes.container.name": "agent",
		}),
		client.WithNewSpec(oci.WithImageConfig(img), oci.WithMounts([]specs.Mount{
			{Destination: "/etc/hosts", Source: hosts, Type: "bind", Options: []string{"rbind"}},
			{Destination: "/etc/resolv.conf", Source: resolv, Type: "bind", Options: []string{"rbind"}},
		})))
	require.NoError(t, err)
	defer func() { require.NoError(t, agent.Delete(ctx, client.WithSnapshotCleanup)) }()

	r := newRuntime(t, s, func(c *ctrd.Config) { c.PodUID, c.NetNSPath, c.CgroupParent = "pod-1", "", "" })
	err = r.Ping(ctx)
	require.Equal(t, fault.RuntimeUnavailable, fault.ReasonOf(err), "a sandbox without a task does not count: %v", err)

	task, err := sandbox.NewTask(ctx, cio.NullIO)
	require.NoError(t, err)
	require.NoError(t, task.Start(ctx))
	defer func() { _, err := task.Delete(ctx, client.WithProcessKill); require.NoError(t, err) }()
	require.NoError(t, r.Ping(ctx))
	out := run(t, s, r, func(c *runtime.Container) { c.Network = runtime.NetworkAgent },
		"readlink /proc/self/ns/net; cat /etc/hosts /etc/resolv.conf; cat /proc/self/cgroup; echo x >>/etc/hosts")
	podNS, err := os.Readlink("/proc/" + itoa(task.Pid()) + "/ns/net")
	require.NoError(t, err)
	require.Contains(t, out, podNS)
	require.Contains(t, out, "podhost")
	require.Contains(t, out, "nameserver 10.9.9.9")
	require.Contains(t, out, pod+"/fsb-")
	require.Contains(t, out, "Read-only file system", "the Pod's files are not the sandbox's")

	out = run(t, s, r, nil, "readlink /proc/self/ns/net; ip link show lo; cat /etc/hosts 2>&1")
	require.NotContains(t, out, podNS)
	require.Contains(t, out, "LOOPBACK,UP")
	require.NotContains(t, out, "podhost")
}

func itoa(n uint32) string {
	raw, _ := json.Marshal(n) //nolint:errchkjson // a number
	return string(raw)
}

func TestSandboxesAreHardened(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	s.Import(t, "docker.io/library/app:test", containerd.Image(t, containerd.WithUser("app"), containerd.WithEnv("E=1")))
	r := newRuntime(t, s, nil)
	out := run(t, s, r, nil, `grep -E 'NoNewPrivs|^Seccomp:|CapEff|CapBnd' /proc/self/status
mount -t tmpfs none /tmp 2>&1 || echo no mount
cat /proc/kcore 2>&1 | head -c 1 | wc -c; echo 1 >/proc/sys/kernel/hostname 2>&1 || echo no sysctl; touch /sys/x 2>&1 || echo no sys
ls /proc | grep -c '^[0-9]'; hostname; touch /tmp/ok && echo tmp ok; cat /proc/self/oom_score_adj`)
	for _, want := range []string{"NoNewPrivs:\t1", "Seccomp:\t2", "CapBnd:\t00000000800405fb", "no mount", "no sysctl", "no sys", "box", "tmp ok"} {
		require.Contains(t, out, want)
	}
	out = run(t, s, r, func(c *runtime.Container) { c.Image = "app:test"; c.Env = map[string]string{"TRACEPARENT": "tp"} }, "id; env; grep CapEff /proc/self/status")
	for _, want := range []string{"uid=1000(app) gid=1000(app)", "2000(extra)", "HOME=/home/app", "E=1", "TRACEPARENT=tp", "HOSTNAME=box", "CapEff:\t0000000000000000"} {
		require.Contains(t, out, want)
	}
	// Nothing of the host is visible: each sandbox has its own root.
	require.Equal(t, "0\n", run(t, s, r, nil, "ls /tmp | wc -l"))
}

func TestPullFromRegistry(t *testing.T) {
	s := containerd.Start(t)
	var blobs atomic.Int32
	registry := containerd.NewRegistry(t, "", "", func(_ http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
			blobs.Add(1)
		}
		return false
	})
	img := containerd.Image(t, containerd.WithFile("extra.txt", "extra", 0o644))
	ref := registry.Push(t, "team/app:1", img)
	r := newRuntime(t, s, nil)
	blobs.Store(0)
	changed := make(chan struct{}, 100)
	watching := make(chan error, 1)
	go func() { watching <- r.WatchImages(t.Context(), func() { changed <- struct{}{} }) }()
	var wg sync.WaitGroup
	var mu sync.Mutex
	phases := map[string]bool{}
	for range 5 {
		wg.Go(func() {
			name, err := r.Pull(t.Context(), ref, func(p runtime.Progress) {
				mu.Lock()
				defer mu.Unlock()
				phases[p.Phase] = true
			})
			if err != nil || name != ref {
				t.Errorf("pulling: %q %v", name, err)
			}
		})
	}
	wg.Wait()
	require.Equal(t, int32(3), blobs.Load(), "a configuration and two layers, once")
	require.True(t, phases[runtime.PhaseResolving] && phases[runtime.PhaseDone], "%v", phases)
	select {
	case <-changed:
	case <-time.After(testkit.Timeout):
		t.Fatal("the new image was not reported")
	}
	images, err := r.Images(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{ref}, images)
	require.Equal(t, "extra", run(t, s, r, func(c *runtime.Container) { c.Image = ref }, "cat /extra.txt"))

	// Without its record the image is pulled again.
	require.NoError(t, s.Client.ImageService().Delete(t.Context(), ref))
	require.Equal(t, "extra", run(t, s, r, func(c *runtime.Container) { c.Image = ref }, "cat /extra.txt"), "pulled by the create")
}

func TestPrivateRegistry(t *testing.T) {
	s := containerd.Start(t)
	var open atomic.Bool
	open.Store(true)
	registry := containerd.NewRegistry(t, "", "", func(w http.ResponseWriter, r *http.Request) bool {
		user, password, _ := r.BasicAuth()
		if open.Load() || user == "me" && password == "secret" {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	ref := registry.Push(t, "private/app:1", containerd.Image(t))
	open.Store(false)
	config := filepath.Join(s.Dir, "config.json")
	r := newRuntime(t, s, func(c *ctrd.Config) { c.DockerConfig = config })
	_, err := r.Pull(t.Context(), ref, nil)
	require.True(t, errdefs.IsNotFound(err), "%v", err)
	require.Equal(t, fault.ImageNotFound, fault.ReasonOf(err))
	write := func(password string) {
		raw, err := json.Marshal(map[string]any{"auths": map[string]any{registry.Host: map[string]string{"username": "me", "password": password}}})
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(config, raw, 0o600))
	}
	write("wrong")
	_, err = r.Pull(t.Context(), ref, nil)
	require.Equal(t, fault.ImageNotFound, fault.ReasonOf(err), "%v", err)
	write("secret")
	_, err = r.Pull(t.Context(), ref, nil)
	require.NoError(t, err)
}

func TestRegistryErrors(t *testing.T) {
	s := containerd.Start(t)
	for name, answer := range map[string]int{"broken": http.StatusServiceUnavailable, "overloaded": http.StatusBadGateway} {
		registry := containerd.NewRegistry(t, "", "", func(w http.ResponseWriter, _ *http.Request) bool {
			w.WriteHeader(answer)
			return true
		})
		r := newRuntime(t, s, nil)
		_, err := r.Pull(t.Context(), registry.Host+"/x:1", nil)
		require.Equal(t, fault.ImagePullFailed, fault.ReasonOf(err), "%s: %v", name, err)
	}
	s.Down(t)
	r := newRuntime(t, s, nil)
	_, err := r.Images(t.Context())
	require.Equal(t, fault.RuntimeUnavailable, fault.ReasonOf(err), "%v", err)
}

// TestSnapshotNamesItsAgent: the janitor finds the owner of a snapshot that has no container by this label.
func TestSnapshotNamesItsAgent(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, func(c *ctrd.Config) { c.PodUID = "pod-1" })
	id := uuid.NewString() + "-1"
	dir := filepath.Join(s.LogRoot, id)
	require.NoError(t, os.MkdirAll(dir, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "output.log"), nil, 0o600))
	record, err := anypb.New(durationpb.New(1))
	require.NoError(t, err)
	require.NoError(t, r.Create(t.Context(), runtime.Container{
		ID: id, Image: containerd.Busybox, Command: []string{"true"}, Record: record, Hostname: "box", LogPath: filepath.Join(dir, "output.log"), Network: runtime.NetworkNone,
	}, func(runtime.Stage) {}))
	info, err := s.Client.SnapshotService("overlayfs").Stat(t.Context(), id)
	require.NoError(t, err)
	require.Equal(t, "pod-1", info.Labels[identity.KeyAgentUID])
	require.NoError(t, r.Delete(t.Context(), id))
}
