//go:build integration

package rights_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	kube "sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

func sandbox(name string) *sandboxv1.CreateSandboxRequest {
	return &sandboxv1.CreateSandboxRequest{Namespace: ns, Name: name, Spec: &sandboxv1.SandboxSpec{Image: "docker.io/library/busybox:1", Pool: "default"}}
}

// create creates a sandbox, and waits until its resource says that it runs.
func (m *mesh) create(r *sandboxv1.CreateSandboxRequest) *v1alpha1.Sandbox {
	m.t.Helper()
	m.eventually("creating "+r.GetName(), func(ctx context.Context) error {
		_, err := m.sandboxes.CreateSandbox(ctx, r)
		if status.Code(err) == codes.AlreadyExists {
			return nil
		}
		return err
	})
	return m.running(r.GetName())
}

// running waits until a Sandbox runs.
func (m *mesh) running(name string) *v1alpha1.Sandbox {
	m.t.Helper()
	s := &v1alpha1.Sandbox{}
	m.eventually(name+" runs", func(ctx context.Context) error {
		if err := m.admin.Get(ctx, kube.ObjectKey{Namespace: ns, Name: name}, s); err != nil {
			return err
		}
		if s.Status.Phase != v1alpha1.PhaseRunning {
			return fmt.Errorf("it is %q: %v", s.Status.Phase, s.Status.Conditions)
		}
		return nil
	})
	return s
}

func (m *mesh) delete(name string) {
	m.t.Helper()
	_, err := m.sandboxes.DeleteSandbox(m.t.Context(), &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: name, GracePeriod: durationpb.New(0)})
	require.NoError(m.t, err)
	m.gone(&v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}})
}

// useSandboxes creates, changes and deletes sandboxes in each way that concerns the API server.
func (m *mesh) useSandboxes(a *agent) {
	ctx := m.t.Context()
	m.create(sandbox("fast"))
	_, err := m.sandboxes.UpdateSandbox(ctx, &sandboxv1.UpdateSandboxRequest{
		Sandbox: &sandboxv1.Sandbox{Namespace: ns, Name: "fast", Labels: map[string]string{"team": "red"}}, UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"labels"}}})
	require.NoError(m.t, err)
	m.delete("fast")
	strong := sandbox("strong")
	strong.Spec.ConsistencyMode = sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG
	m.create(strong)
	m.delete("strong")

	nowhere := sandbox("nowhere")
	nowhere.Spec.Pool = "nowhere"
	_, err = m.sandboxes.CreateSandbox(ctx, nowhere)
	require.Equal(m.t, codes.NotFound, status.Code(err), "%v", err)
	_, err = m.sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: "nowhere"})
	require.Equal(m.t, codes.NotFound, status.Code(err), "%v", err)

	m.refuse("refused")
	_, err = m.sandboxes.CreateSandbox(ctx, sandbox("refused"))
	require.NoError(m.t, err)
	m.event("Rejected")

	short := sandbox("short")
	short.Spec.TtlAfterFinished = durationpb.New(time.Second)
	ended := m.create(short)
	a.Stop(ended.EffectiveUID(), 0)
	m.gone(ended)

	require.NoError(m.t, m.admin.Create(ctx, &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "declared"},
		Spec: v1alpha1.SandboxSpec{Image: "docker.io/library/busybox:1"}}))
	m.running("declared")
	m.delete("declared")
	m.strip(a, "stripped")
}

// strip removes a Sandbox in spite of its finalizer: the controller deletes the container nevertheless.
func (m *mesh) strip(a *agent, name string) {
	ctx := m.t.Context()
	strong := sandbox(name)
	strong.Spec.ConsistencyMode = sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG
	s := m.create(strong)
	a.busy.Store(true)
	require.NoError(m.t, m.admin.Delete(ctx, s))
	m.eventually("removing the finalizer", func(ctx context.Context) error {
		if err := m.admin.Get(ctx, kube.ObjectKeyFromObject(s), s); err != nil {
			return err
		}
		s.Finalizers = nil
		return m.admin.Update(ctx, s)
	})
	m.gone(s)
	a.busy.Store(false)
	m.eventually("the container of a removed Sandbox is deleted", func(context.Context) error {
		for _, r := range a.Sandboxes() {
			return fmt.Errorf("that of %s is left", r.GetRecord().GetName())
		}
		return nil
	})
}

// refuse has the API server's admission refuse a Sandbox by its name.
func (m *mesh) refuse(name string) {
	ctx := m.t.Context()
	require.NoError(m.t, m.admin.Create(ctx, &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Create},
				Rule:       admissionv1.Rule{APIGroups: []string{v1alpha1.Group}, APIVersions: []string{"*"}, Resources: []string{"sandboxes"}}}}}},
			Validations: []admissionv1.Validation{{Expression: "object.metadata.name != '" + name + "'", Message: "refused by the test"}},
		}}))
	require.NoError(m.t, m.admin.Create(ctx, &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny}}}))
	m.eventually("the policy is in force", func(ctx context.Context) error {
		probe := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}, Spec: v1alpha1.SandboxSpec{Image: "busybox"}}
		if m.admin.Create(ctx, probe, kube.DryRunAll) == nil {
			return errors.New("it admits the Sandbox")
		}
		return nil
	})
}

// event waits for an Event with a reason.
func (m *mesh) event(reason string) {
	m.t.Helper()
	m.eventually("an Event "+reason, func(ctx context.Context) error {
		var list eventsv1.EventList
		if err := m.admin.List(ctx, &list); err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.Reason == reason {
				return nil
			}
		}
		return errors.New("there is none")
	})
}

// get sends a request to the gateway and returns an error unless it answers OK.
func (m *mesh) get(ctx context.Context, url, token string) error {
	raw, err := os.ReadFile(m.ca)
	require.NoError(m.t, err)
	roots := x509.NewCertPool()
	require.True(m.t, roots.AppendCertsFromPEM(raw))
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}}
	defer transport.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	require.NoError(m.t, err)
	r.Header.Set("Authorization", "Bearer "+token)
	answer, err := (&http.Client{Transport: transport}).Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	body, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", answer.Status, body)
	}
	return err
}

// useGateway calls allocator and gc through the gateway, and a sandbox that does not exist.
func (m *mesh) useGateway() {
	address, _ := freeAddress(m.t)
	streams, _ := freeAddress(m.t)
	gateway := m.run("gateway", account{system, "gateway"}, rpc.RoleGateway, "--bind-address="+address, "--grpc-bind-address="+streams,
		"--allocator-address="+m.allocatorAddress, "--gc-address="+m.gcAddress)
	for _, token := range []string{m.token, m.key} {
		for _, path := range []string{"/v1/namespaces/" + ns + "/sandboxes", "/v1/gc/namespaces/" + ns + "/graph"} {
			m.eventually("the gateway answers", func(ctx context.Context) error { return m.get(ctx, "https://"+address+path, token) })
		}
		m.eventually("the gateway authorizes calls into sandboxes itself", func(ctx context.Context) error {
			err := m.get(ctx, "https://"+address+"/v1/namespaces/"+ns+"/sandboxes/unknown/processes", token)
			if err == nil || !strings.Contains(err.Error(), "SANDBOX_NOT_FOUND") {
				return fmt.Errorf("want SANDBOX_NOT_FOUND, have %w", err)
			}
			return nil
		})
	}
	gateway.stop()
}

// startCollector starts a garbage collector and returns a client for each way of authentication.
func (m *mesh) startCollector(args ...string) []gcv1.GarbageCollectorServiceClient {
	m.gcAddress, _ = freeAddress(m.t)
	m.gc = m.run("gc", account{system, "gc"}, rpc.RoleGC, append([]string{"--namespace=" + system, "--bind-address=" + m.gcAddress}, args...)...)
	var out []gcv1.GarbageCollectorServiceClient
	for _, token := range []string{m.token, m.key} {
		conn, err := rpc.Dial(m.gcAddress, m.serverOf(rpc.RoleGC, token))
		require.NoError(m.t, err)
		m.t.Cleanup(func() { require.NoError(m.t, conn.Close()) })
		out = append(out, gcv1.NewGarbageCollectorServiceClient(conn))
	}
	return out
}

// orphan creates a ConfigMap whose owner does not exist.
func (m *mesh) orphan(name string, owner metav1.OwnerReference) *corev1.ConfigMap {
	o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, OwnerReferences: []metav1.OwnerReference{owner}}}
	require.NoError(m.t, m.admin.Create(m.t.Context(), o))
	return o
}

var absent = metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: "absent", UID: "absent"}

// observe runs a garbage collector that observes. It runs until collect.
func (m *mesh) observe() {
	m.orphan("orphan", absent)
	for _, c := range m.startCollector("--mode=observe") {
		m.eventually("the collector explains an object", func(ctx context.Context) error {
			x, err := c.ExplainObject(ctx, &gcv1.ExplainObjectRequest{Object: &gcv1.Selector{By: &gcv1.Selector_Place{Place: &gcv1.Place{
				Kind: &gcv1.Kind{Kind: "ConfigMap"}, Namespace: ns, Name: "orphan"}}}})
			if err == nil && x.GetState() != gcv1.State_STATE_DOOMED {
				err = fmt.Errorf("it is %s", x.GetState())
			}
			return err
		})
		s, err := c.GetStatus(m.t.Context(), &gcv1.GetStatusRequest{})
		require.NoError(m.t, err)
		require.Empty(m.t, s.GetFailing(), "it may not read what it watches")
	}
}

// collect replaces the garbage collector by one that enforces, with the rights for it.
func (m *mesh) collect() {
	m.gc.stop()
	m.grant(manifests(m.t, "components/gc-enforce"))
	var stranger corev1.ConfigMap
	stranger.Namespace, stranger.Name = system, "owner"
	require.NoError(m.t, m.admin.Create(m.t.Context(), &stranger))
	m.startCollector("--mode=enforce", "--rival-check=300ms", "--pod-gc-period=200ms", "--pod-gc-quarantine=600ms")
	m.gone(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "orphan"}})
	m.gone(m.orphan("misled", metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: stranger.Name, UID: stranger.UID}))
	m.event("OwnerRefInvalidNamespace")
	// A finalizer of the collector's own is patched away.
	freed := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "freed"}}
	require.NoError(m.t, m.admin.Create(m.t.Context(), freed))
	require.NoError(m.t, m.admin.Delete(m.t.Context(), freed, kube.PropagationPolicy(metav1.DeletePropagationForeground)))
	m.gone(freed)
}

// sweepNode runs a janitor on a node with two containers that no component manages.
func (m *mesh) sweepNode() {
	ctx := m.t.Context()
	n := containerd.Start(m.t)
	n.Import(m.t, containerd.Busybox, containerd.Image(m.t))
	pod := podIn(ns)
	pod.Spec.NodeName = node
	require.NoError(m.t, m.admin.Create(ctx, pod))
	for name, agentUID := range map[string]string{"agent-gone": uuid.NewString(), "resource-gone": string(pod.UID)} {
		m.container(n, identity.Identity{Namespace: ns, Name: name, SandboxUID: uuid.NewString(), Attempt: 1, AgentUID: agentUID, Pool: "p",
			State: identity.StateClaimed, Persisted: true})
	}
	address, _ := freeAddress(m.t)
	janitor := m.run("janitor", account{janitors, "janitor"}, rpc.RoleJanitor, "--bind-address="+address, "--node-name="+node,
		"--containerd-socket="+n.Socket, "--containerd-state="+filepath.Join(n.Dir, "s"), "--log-root="+n.LogRoot, "--fifo-root="+filepath.Join(n.Dir, "fifo"),
		"--cgroup-parents="+n.CgroupParent, "--host-proc=", "--grace=1s", "--scan-interval=1s")
	for _, token := range []string{m.token, m.key} {
		conn, err := rpc.Dial(address, m.serverOf(rpc.RoleJanitor, token))
		require.NoError(m.t, err)
		m.eventually("the janitor answers", func(ctx context.Context) error {
			_, err := janitorv1.NewJanitorServiceClient(conn).ListVerdicts(ctx, &janitorv1.ListVerdictsRequest{})
			return err
		})
		require.NoError(m.t, conn.Close())
	}
	m.eventually("the janitor deletes the containers", func(ctx context.Context) error {
		left, err := n.Client.ContainerService().List(ctx)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%d containers are left", len(left))
		}
		return err
	})
	m.event("OrphanRemoved")
	janitor.stop()
	require.NoError(m.t, m.admin.Delete(ctx, pod, &kube.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
}

// container creates a container as an agent does, without a task.
func (m *mesh) container(n *containerd.Server, id identity.Identity) {
	ctx := m.t.Context()
	image, err := n.Client.GetImage(ctx, containerd.Busybox)
	require.NoError(m.t, err)
	record, err := anypb.New(&agentv1.SandboxRecord{Name: id.Name})
	require.NoError(m.t, err)
	_, err = n.Client.NewContainer(ctx, id.ContainerID(), client.WithSnapshotter(ctrd.DefaultSnapshotter), client.WithImage(image),
		client.WithNewSnapshot(id.ContainerID(), image), client.WithNewSpec(oci.WithImageConfig(image)), client.WithContainerLabels(id.Labels()),
		client.WithContainerExtension(ctrd.RecordKey, record))
	require.NoError(m.t, err)
}
