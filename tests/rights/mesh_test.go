//go:build integration

package rights_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	authv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/auth/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
)

// mesh is the components on a cluster. Its steps are called in the order of TestEachComponentUsesItsRights.
type mesh struct {
	*cluster

	// token and key authenticate one user.
	token, key, keyID string
	// allocatorAddress and agentPort are where allocator and agents listen, agentCA has the files of the agents' authority.
	allocatorAddress, gcAddress string
	agentPort                   int
	agentCA                     [2]string

	allocator, controller, gc *process
	conn                      *grpc.ClientConn
	sandboxes                 sandboxv1.SandboxServiceClient
}

// agent is a fake agent in a Pod of the controller's.
type agent struct {
	*fakeagent.Agent
	pod  *corev1.Pod
	stop func()
	// busy: it deletes nothing.
	busy *atomic.Bool
}

func (m *mesh) startAllocator() {
	m.allocatorAddress, _ = freeAddress(m.t)
	_, m.agentPort = freeAddress(m.t)
	m.allocator = m.run("allocator", account{system, "allocator"}, rpc.RoleAllocator, "--bind-address="+m.allocatorAddress,
		"--advertise-address="+m.allocatorAddress, "--namespace="+system, "--pod-name=allocator-1", fmt.Sprint("--agent-port=", m.agentPort))
	conn, err := rpc.Dial(m.allocatorAddress, m.serverOf(rpc.RoleAllocator, m.token))
	require.NoError(m.t, err)
	m.t.Cleanup(func() { require.NoError(m.t, conn.Close()) })
	m.conn, m.sandboxes = conn, sandboxv1.NewSandboxServiceClient(conn)
	m.eventually("the allocator serves", func(ctx context.Context) error {
		_, err := m.sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Namespace: ns})
		return err
	})
}

// resolveServices starts gateway and controller with the Services as the addresses of the others, as the manifests have it. Nothing
// is behind these Services here.
func (m *mesh) resolveServices() {
	address, _ := freeAddress(m.t)
	streams, _ := freeAddress(m.t)
	gateway := m.runInPod("gateway", account{system, "gateway"}, rpc.RoleGateway, "--bind-address="+address, "--grpc-bind-address="+streams)
	controller := m.runInPod("controller", account{system, "controller"}, rpc.RoleController, m.controllerArgs()...)
	for _, name := range []string{"gateway", "controller"} {
		m.eventually(name+" resolves the allocator", func(ctx context.Context) error {
			if name == "gateway" {
				_ = m.get(ctx, "https://"+address+"/v1/namespaces/"+ns+"/sandboxes", m.token) // nothing answers
			}
			for _, r := range m.requests() {
				if r.account() == name && r.Verb == "watch" && r.Object.Resource == "endpointslices" {
					return nil
				}
			}
			return errors.New("there is no watch")
		})
	}
	gateway.stop()
	controller.stop()
}

func (m *mesh) controllerArgs(args ...string) []string {
	if m.agentCA[0] == "" {
		m.agentCA = m.newAgentCA()
	}
	return append([]string{"--namespace=" + system, fmt.Sprint("--agent-port=", m.agentPort), "--requeue-interval=200ms",
		"--agent-ca-cert-file=" + m.agentCA[0], "--agent-ca-key-file=" + m.agentCA[1]}, args...)
}

func (m *mesh) startController() {
	m.controller = m.run("controller", account{system, "controller"}, rpc.RoleController, m.controllerArgs("--allocator-address="+m.allocatorAddress)...)
}

// newAgentCA makes the authority that signs the agents' certificates, and returns its files.
func (m *mesh) newAgentCA() [2]string {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(m.t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "agents"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(48 * time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(m.t, err)
	private, err := x509.MarshalECPrivateKey(key)
	require.NoError(m.t, err)
	files := [2]string{filepath.Join(m.dir, "agent-ca.crt"), filepath.Join(m.dir, "agent-ca.key")}
	for i, block := range []*pem.Block{{Type: "CERTIFICATE", Bytes: cert}, {Type: "EC PRIVATE KEY", Bytes: private}} {
		require.NoError(m.t, os.WriteFile(files[i], pem.EncodeToMemory(block), 0o600))
	}
	return files
}

// createPool creates the pool of the manifests.
func (m *mesh) createPool(objects []*unstructured.Unstructured) {
	for _, o := range objects {
		if o.GetKind() == "SandboxPool" {
			var p v1alpha1.SandboxPool
			require.NoError(m.t, runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &p))
			p.Spec.Capacity.BufferMin, p.Spec.Capacity.PoolMax = 0, 1
			require.NoError(m.t, m.admin.Create(m.t.Context(), &p))
		}
	}
}

// startAgent waits for an agent Pod with its certificate, and starts it as a kubelet does.
func (m *mesh) startAgent() *agent {
	var pod *corev1.Pod
	m.eventually("an agent Pod with a certificate", func(ctx context.Context) error {
		var pods corev1.PodList
		if err := m.admin.List(ctx, &pods, client.InNamespace(ns), client.MatchingLabels{v1alpha1.LabelComponent: v1alpha1.ComponentAgent}); err != nil {
			return err
		}
		if len(pods.Items) != 1 || pods.Items[0].DeletionTimestamp != nil {
			return fmt.Errorf("there are %d agent Pods", len(pods.Items))
		}
		pod = &pods.Items[0]
		return m.admin.Get(ctx, client.ObjectKey{Namespace: ns, Name: pod.Name + "-tls"}, &corev1.Secret{})
	})
	ctx := m.t.Context()
	require.NoError(m.t, m.admin.SubResource("binding").Create(ctx, pod, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: pod.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: node}}))
	require.NoError(m.t, m.admin.Get(ctx, client.ObjectKeyFromObject(pod), pod))
	pod.Status.Phase, pod.Status.PodIP, pod.Status.PodIPs = corev1.PodRunning, "127.0.0.1", []corev1.PodIP{{IP: "127.0.0.1"}}
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	require.NoError(m.t, m.admin.Status().Update(ctx, pod))

	l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", m.agentPort))
	require.NoError(m.t, err)
	a := &agent{pod: pod, busy: &atomic.Bool{}, Agent: fakeagent.New(&agentv1.AgentInfo{PodName: pod.Name, PodUid: string(pod.UID), Namespace: ns, Pool: "default",
		NodeName: node, PodIp: "127.0.0.1", Capacity: 16})}
	a.OnDelete = func(context.Context, *agentv1.Fence) error {
		if a.busy.Load() {
			return errors.New("busy")
		}
		return nil
	}
	files := m.pki.Agent(m.t, rpc.AgentID{Namespace: ns, Pod: pod.Name, UID: string(pod.UID)})
	serving, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { _ = a.Serve(serving, l, files) })
	a.stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	m.t.Cleanup(a.stop)
	agents := allocatorv1.NewAllocatorServiceClient(m.conn)
	m.eventually("the agent is ready", func(ctx context.Context) error {
		list, err := agents.ListAgents(ctx, &allocatorv1.ListAgentsRequest{Namespace: ns})
		if err != nil {
			return err
		}
		if len(list.GetAgents()) != 1 || !list.GetAgents()[0].GetReady() {
			return fmt.Errorf("agents: %v", list.GetAgents())
		}
		return nil
	})
	return a
}

// createKey makes an API key of the user, with which every component is called, too.
func (m *mesh) createKey() {
	keys := authv1.NewAuthServiceClient(m.conn)
	made, err := keys.CreateAPIKey(m.t.Context(), &authv1.CreateAPIKeyRequest{Namespace: ns, ServiceAccount: "caller"})
	require.NoError(m.t, err)
	m.key, m.keyID = made.GetKey(), made.GetApiKey().GetId()
	list, err := keys.ListAPIKeys(m.t.Context(), &authv1.ListAPIKeysRequest{Namespace: ns})
	require.NoError(m.t, err)
	require.Len(m.t, list.GetApiKeys(), 1)
	conn, err := rpc.Dial(m.allocatorAddress, m.serverOf(rpc.RoleAllocator, m.key))
	require.NoError(m.t, err)
	defer func() { require.NoError(m.t, conn.Close()) }()
	_, err = sandboxv1.NewSandboxServiceClient(conn).ListSandboxes(m.t.Context(), &sandboxv1.ListSandboxesRequest{Namespace: ns})
	require.NoError(m.t, err)
}

func (m *mesh) revokeKey() {
	_, err := authv1.NewAuthServiceClient(m.conn).RevokeAPIKey(m.t.Context(), &authv1.RevokeAPIKeyRequest{Namespace: ns, Id: m.keyID})
	require.NoError(m.t, err)
}

// replaceCertificate has the controller find a Secret that does not belong to the agent.
func (m *mesh) replaceCertificate(a *agent) {
	m.controller.stop()
	var secret corev1.Secret
	key := client.ObjectKey{Namespace: ns, Name: a.pod.Name + "-tls"}
	require.NoError(m.t, m.admin.Get(m.t.Context(), key, &secret))
	secret.OwnerReferences = nil
	require.NoError(m.t, m.admin.Update(m.t.Context(), &secret))
	m.startController()
	m.eventually("the certificate is replaced", func(ctx context.Context) error {
		if err := m.admin.Get(ctx, key, &secret); err != nil {
			return err
		}
		if !metav1.IsControlledBy(&secret, a.pod) {
			return errors.New("it has no owner")
		}
		return nil
	})
}

// loseAgent deletes the Pod of an agent with a sandbox, which is then deleted.
func (m *mesh) loseAgent(a *agent) {
	m.create(sandbox("lost"))
	a.stop()
	require.NoError(m.t, m.admin.Delete(m.t.Context(), a.pod, client.GracePeriodSeconds(0)))
	m.delete("lost")
}

// deletePool deletes the pool with an agent that has not started.
func (m *mesh) deletePool() {
	p := &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "default"}}
	m.eventually("the pool has another agent", func(ctx context.Context) error {
		if err := m.admin.Get(ctx, client.ObjectKeyFromObject(p), p); err != nil {
			return err
		}
		if p.Status.CurrentAgents != 1 {
			return fmt.Errorf("it has %d", p.Status.CurrentAgents)
		}
		return nil
	})
	require.NoError(m.t, m.admin.Delete(m.t.Context(), p))
	m.gone(p)
}

func (m *mesh) gone(o client.Object) {
	m.t.Helper()
	m.eventually(o.GetName()+" is removed", func(ctx context.Context) error {
		err := m.admin.Get(ctx, client.ObjectKeyFromObject(o), o)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		if err == nil {
			return errors.New("it is still there")
		}
		return nil
	})
}

// stop stops the components, so that the audit log is complete.
func (m *mesh) stop() {
	m.controller.stop()
	m.gc.stop()
	m.allocator.stop()
}
