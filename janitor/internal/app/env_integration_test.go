//go:build integration

package app_test

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/go-logr/logr"
	"github.com/google/uuid"
	"github.com/opencontainers/image-spec/identity"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/anypb"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	kube "sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	crlog "sigs.k8s.io/controller-runtime/pkg/log"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	fsb "github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

const (
	ns   = "default"
	node = "node-1"
)

// testEnv is a node with a real containerd, and a cluster with a real API server.
type testEnv struct {
	*containerd.Server

	t     *testing.T
	admin kube.Client
	rest  *rest.Config
	// kubeconfig is a file with the same access as rest.
	kubeconfig string
	env        *envtest.Environment

	mu   sync.Mutex
	said []string // by janitors in this process
}

func newTestEnv(t *testing.T) *testEnv {
	t.Helper()
	crlog.SetLogger(logr.Discard())
	root, err := filepath.Abs("../../..")
	require.NoError(t, err)
	assets := config.Env("KUBEBUILDER_ASSETS")
	if assets == "" {
		assets = filepath.Join(root, "bin", "k8s")
	}
	env := &envtest.Environment{CRDDirectoryPaths: []string{filepath.Join(root, "deploy", "crd")}, ErrorIfCRDPathMissing: true, BinaryAssetsDirectory: assets}
	server := env.ControlPlane.GetAPIServer()
	server.Configure().Append("disable-admission-plugins", "ServiceAccount")
	server.CertDir = t.TempDir() // its default directory is deleted with the process, and clients trust what is in it
	cfg, err := env.Start()
	require.NoError(t, err, "starting etcd and kube-apiserver from %s", assets)
	t.Cleanup(func() { require.NoError(t, env.Stop()) })
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, v1alpha1.AddToScheme, eventsv1.AddToScheme} {
		require.NoError(t, add(scheme))
	}
	admin, err := kube.New(cfg, kube.Options{Scheme: scheme})
	require.NoError(t, err)
	w := &testEnv{Server: containerd.Start(t), t: t, admin: admin, rest: cfg, env: env}
	w.Import(t, containerd.Busybox, containerd.Image(t))
	w.kubeconfig = filepath.Join(w.Dir, "kubeconfig")
	require.NoError(t, os.WriteFile(w.kubeconfig, env.KubeConfig, 0o600))
	return w
}

// pod creates an agent's Pod and returns its uid.
func (w *testEnv) pod(name string) string {
	w.t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "agent", Image: "agent"}}},
	}
	require.NoError(w.t, w.admin.Create(w.t.Context(), p))
	return string(p.UID)
}

func (w *testEnv) deletePod(name string) {
	w.t.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
	require.NoError(w.t, w.admin.Delete(w.t.Context(), p, kube.GracePeriodSeconds(0)))
}

// sandbox writes a Sandbox that is assigned to a container.
func (w *testEnv) sandbox(id fsb.Identity) *v1alpha1.Sandbox {
	w.t.Helper()
	s := &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: ns, Name: id.Name, Labels: map[string]string{v1alpha1.LabelNode: node}, Finalizers: []string{v1alpha1.Finalizer},
			Annotations: map[string]string{v1alpha1.AnnotationSandboxUID: id.SandboxUID},
		},
		Spec: v1alpha1.SandboxSpec{Image: "busybox", PoolRef: "p"},
	}
	s.SetAssignment(assignment(id))
	require.NoError(w.t, w.admin.Create(w.t.Context(), s))
	return s
}

func assignment(id fsb.Identity) *v1alpha1.Assignment {
	return &v1alpha1.Assignment{AgentUID: id.AgentUID, SandboxUID: id.SandboxUID, Attempt: id.Attempt, NodeName: node}
}

// unassigned writes a Sandbox without an assignment, which no node's cache shows.
func (w *testEnv) unassigned(id fsb.Identity) {
	w.t.Helper()
	require.NoError(w.t, w.admin.Create(w.t.Context(), &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: id.Name, Annotations: map[string]string{v1alpha1.AnnotationSandboxUID: id.SandboxUID}},
		Spec:       v1alpha1.SandboxSpec{Image: "busybox", PoolRef: "p"},
	}))
}

// strip deletes a Sandbox behind the mesh's back.
func (w *testEnv) strip(s *v1alpha1.Sandbox) {
	w.t.Helper()
	s.Finalizers = nil
	require.NoError(w.t, w.admin.Update(w.t.Context(), s))
	require.NoError(w.t, w.admin.Delete(w.t.Context(), s))
}

// claimed returns the identity of a new sandbox.
func claimed(name, agentUID string) fsb.Identity {
	return fsb.Identity{Namespace: ns, Name: name, SandboxUID: uuid.NewString(), Attempt: 1, AgentUID: agentUID, Pool: "p", State: fsb.StateClaimed, Persisted: true}
}

// thing is a container as an agent creates it.
type thing struct {
	id  string
	pid uint32
}

// blueprint describes a container to create.
type blueprint struct {
	id     string
	labels map[string]string
	state  verdict.Container
	// group is the container in whose shim it runs; empty for its own.
	group string
	// record is the content of the sandbox's record; nil for a complete one.
	record []byte
}

// container creates a container with everything that belongs to one, and brings it into a state.
func (w *testEnv) container(id string, labels map[string]string, state verdict.Container) thing {
	w.t.Helper()
	return w.make(blueprint{id: id, labels: labels, state: state})
}

func (w *testEnv) make(m blueprint) thing {
	w.t.Helper()
	ctx := w.t.Context()
	image, err := w.Client.GetImage(ctx, containerd.Busybox)
	require.NoError(w.t, err)
	record, err := anypb.New(&agentv1.SandboxRecord{Name: m.id, Traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})
	require.NoError(w.t, err)
	if m.record != nil {
		record.Value = m.record
	}
	spec := []oci.SpecOpts{oci.WithImageConfig(image), oci.WithProcessArgs("sleep", "1000"), oci.WithCgroup(filepath.Join(w.CgroupParent, ctrd.CgroupPrefix+m.id))}
	if m.group != "" {
		spec = append(spec, oci.WithAnnotations(map[string]string{ctrd.GroupAnnotation: m.group}))
	}
	c, err := w.Client.NewContainer(ctx, m.id, client.WithSnapshotter(ctrd.DefaultSnapshotter), client.WithImage(image), client.WithNewSnapshot(m.id, image),
		client.WithNewSpec(spec...), client.WithContainerLabels(m.labels), client.WithContainerExtension(ctrd.RecordKey, record))
	require.NoError(w.t, err)
	w.log(m.id, m.labels[fsb.KeyAgentUID])
	if fsb.IsContainerID(m.id) {
		w.fifo(m.id)
	}
	return thing{id: m.id, pid: w.bring(c, m.state)}
}

// bring brings a new container into a state.
func (w *testEnv) bring(c client.Container, state verdict.Container) (pid uint32) {
	w.t.Helper()
	ctx := w.t.Context()
	if state == verdict.NoTask {
		return 0
	}
	task, err := c.NewTask(ctx, cio.NullIO)
	require.NoError(w.t, err)
	if state == verdict.Created {
		return task.Pid()
	}
	require.NoError(w.t, task.Start(ctx))
	if state == verdict.Stopped {
		exit, err := task.Wait(ctx)
		require.NoError(w.t, err)
		require.NoError(w.t, task.Kill(ctx, unix.SIGKILL))
		<-exit
	}
	return task.Pid()
}

func (w *testEnv) log(id, owner string) string {
	w.t.Helper()
	dir := filepath.Join(w.LogRoot, id)
	require.NoError(w.t, os.MkdirAll(dir, 0o700))
	require.NoError(w.t, os.WriteFile(filepath.Join(dir, ctrd.OutputFile), make([]byte, 8192), 0o600))
	require.NoError(w.t, os.WriteFile(filepath.Join(dir, ctrd.OwnerFile), []byte(owner), 0o600))
	return dir
}

func (w *testEnv) fifoRoot() string { return filepath.Join(w.Dir, "fifo") }

func (w *testEnv) fifo(id string) string {
	w.t.Helper()
	path := filepath.Join(w.fifoRoot(), uuid.NewString()[:8], id+"-stdout")
	require.NoError(w.t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(w.t, unix.Mkfifo(path, 0o600))
	return path
}

// snapshot creates a snapshot without a container.
func (w *testEnv) snapshot(id string) {
	w.t.Helper()
	image, err := w.Client.GetImage(w.t.Context(), containerd.Busybox)
	require.NoError(w.t, err)
	layers, err := image.RootFS(w.t.Context())
	require.NoError(w.t, err)
	_, err = w.Client.SnapshotService(ctrd.DefaultSnapshotter).Prepare(w.t.Context(), id, identity.ChainID(layers).String(),
		snapshots.WithLabels(map[string]string{"containerd.io/gc.root": "test"}))
	require.NoError(w.t, err)
}

// stateDir is containerd's.
func (w *testEnv) stateDir() string { return filepath.Join(w.Dir, "s") }

// mount mounts something in the bundle of a container that does not exist.
func (w *testEnv) mount(id string) string {
	w.t.Helper()
	dir := filepath.Join(w.stateDir(), "io.containerd.runtime.v2.task", ctrd.DefaultNamespace, id, "rootfs")
	require.NoError(w.t, os.MkdirAll(dir, 0o700))
	require.NoError(w.t, unix.Mount("tmpfs", dir, "tmpfs", 0, ""))
	return dir
}

// bundle creates the bundle of a container that has neither a record nor a task, as an agent's create leaves it that was cut short.
func (w *testEnv) bundle(id, agentUID string) {
	w.t.Helper()
	dir := filepath.Join(w.stateDir(), "io.containerd.runtime.v2.task", ctrd.DefaultNamespace, id)
	require.NoError(w.t, os.MkdirAll(filepath.Join(dir, "rootfs"), 0o700))
	spec := fmt.Sprintf(`{"linux":{"cgroupsPath":"/kubepods/pod%s/fsb-%s"}}`, agentUID, id)
	require.NoError(w.t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(spec), 0o600))
}

// cgroup creates an empty cgroup of a container in a hierarchy.
func (w *testEnv) cgroup(id string) string {
	w.t.Helper()
	root := ctrd.DefaultCgroupRoot
	if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err != nil {
		root = filepath.Join(root, "pids")
	}
	dir := filepath.Join(root, w.CgroupParent, ctrd.CgroupPrefix+id)
	require.NoError(w.t, os.MkdirAll(dir, 0o755))
	return dir
}

// remover returns one that sees all of this test's node, and nothing of others.
func (w *testEnv) remover() *ctrd.Remover {
	return &ctrd.Remover{
		Client: w.Client, Snapshotter: ctrd.DefaultSnapshotter, LogRoot: w.LogRoot, ProcRoot: "/proc", CgroupRoot: ctrd.DefaultCgroupRoot,
		FIFORoot: w.fifoRoot(), HostProc: "/proc/self", StateDir: w.stateDir(), CgroupParents: []string{w.CgroupParent},
	}
}

// left returns the containers and snapshots on the node, and the log directories, FIFOs, mounts and cgroups.
func (w *testEnv) left() map[string]bool {
	w.t.Helper()
	out := map[string]bool{}
	list, err := w.Client.ContainerService().List(w.t.Context())
	require.NoError(w.t, err)
	for _, c := range list {
		out["container "+c.ID] = true
	}
	// containerd asks each shim for its tasks, and one that is being killed answers late.
	var pieces []ctrd.Piece
	require.Eventually(w.t, func() bool {
		pieces, err = w.remover().Inventory(w.t.Context())
		return err == nil
	}, testkit.Timeout, testkit.Tick, "the node cannot be listed")
	for _, p := range pieces {
		out[string(p.Part)+" "+p.ID] = true
	}
	return out
}

// pid returns the pid of a container's running task; 0 if it does not run.
func (w *testEnv) pid(id string) uint32 {
	resp, err := w.Client.TaskService().Get(w.t.Context(), &tasks.GetRequest{ContainerID: id})
	if err != nil {
		return 0
	}
	return resp.GetProcess().GetPid()
}

// slotID returns a slot's id that differs from those of other processes: the OCI runtime's state is shared by all containerds.
func slotID(n int) string { return fsb.SlotID(fmt.Sprintf("%010x%010x", os.Getpid(), n)) }
