package pool_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool"
)

func injection() pool.Injection {
	return pool.Injection{AgentPort: 5758, ContainerdSocket: "/run/containerd/containerd.sock", ContainerdRoot: "/var/lib/containerd",
		LogRoot: "/var/log/fast-sandbox", SlotRoot: "/var/lib/fast-sandbox/slots", Env: []corev1.EnvVar{{Name: "OTEL_SERVICE_NAME", Value: "agent"}}}
}

func newPool(change ...func(*corev1.PodSpec)) *v1alpha1.SandboxPool {
	p := &v1alpha1.SandboxPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "py", UID: "uid-1"},
		Spec: v1alpha1.SandboxPoolSpec{MaxSandboxesPerPod: 7, RuntimeHandler: "runc",
			AgentTemplate: v1alpha1.AgentTemplate{
				Metadata: v1alpha1.AgentTemplateMetadata{Labels: map[string]string{"team": "x", v1alpha1.LabelPool: "forged"}, Annotations: map[string]string{"a": "b"}},
				Spec:     corev1.PodSpec{Containers: []corev1.Container{{Name: "side", Image: "side"}, {Name: "agent", Image: "agent:1"}}},
			}},
	}
	for _, c := range change {
		c(&p.Spec.AgentTemplate.Spec)
	}
	return p
}

// golden is the Pod for a minimal template.
const golden = `
metadata:
  name: py-agent-x
  generateName: py-agent-
  namespace: ns
  labels:
    team: x
    fast-sandbox.io/component: agent
    fast-sandbox.io/pool: py
    fast-sandbox.io/template-hash: HASH
  annotations: {a: b}
  ownerReferences:
    - {apiVersion: fast-sandbox.io/v1alpha1, kind: SandboxPool, name: py, uid: uid-1, controller: true, blockOwnerDeletion: true}
spec:
  restartPolicy: Always
  automountServiceAccountToken: false
  enableServiceLinks: false
  hostPID: true
  terminationGracePeriodSeconds: 30
  volumes:
    - {name: fsb-containerd-run, hostPath: {path: /run/containerd, type: Directory}}
    - {name: fsb-containerd-root, hostPath: {path: /var/lib/containerd, type: Directory}}
    - {name: fsb-logs, hostPath: {path: /var/log/fast-sandbox, type: DirectoryOrCreate}}
    - {name: fsb-cgroup, hostPath: {path: /sys/fs/cgroup, type: Directory}}
    - {name: fsb-slots, hostPath: {path: /var/lib/fast-sandbox/slots, type: DirectoryOrCreate}}
    - {name: fsb-state, emptyDir: {}}
    - {name: fsb-tmp, emptyDir: {}}
    - {name: fsb-tls, secret: {secretName: py-agent-x-tls, defaultMode: 256}}
  containers:
    - {name: side, image: side, resources: {}}
    - name: agent
      image: agent:1
      resources: {requests: {cpu: 200m}}
      volumeMounts:
        - {name: fsb-containerd-run, mountPath: /run/containerd}
        - {name: fsb-containerd-root, mountPath: /var/lib/containerd}
        - {name: fsb-logs, mountPath: /var/log/fast-sandbox}
        - {name: fsb-cgroup, mountPath: /host/cgroup}
        - {name: fsb-state, mountPath: /var/lib/fast-sandbox}
        - {name: fsb-slots, mountPath: /var/lib/fast-sandbox/slots}
        - {name: fsb-tmp, mountPath: /tmp}
        - {name: fsb-tls, mountPath: /etc/fast-sandbox/tls, readOnly: true}
      env:
        - {name: POD_NAME, valueFrom: {fieldRef: {apiVersion: v1, fieldPath: metadata.name}}}
        - {name: POD_NAMESPACE, valueFrom: {fieldRef: {apiVersion: v1, fieldPath: metadata.namespace}}}
        - {name: POD_UID, valueFrom: {fieldRef: {apiVersion: v1, fieldPath: metadata.uid}}}
        - {name: POD_IP, valueFrom: {fieldRef: {apiVersion: v1, fieldPath: status.podIP}}}
        - {name: NODE_NAME, valueFrom: {fieldRef: {apiVersion: v1, fieldPath: spec.nodeName}}}
        - {name: AGENT_POOL, value: py}
        - {name: AGENT_CAPACITY, value: "7"}
        - {name: AGENT_RUNTIME_HANDLER, value: runc}
        - {name: CONTAINERD_SOCKET, value: /run/containerd/containerd.sock}
        - {name: FSB_BIND_ADDRESS, value: ":5758"}
        - {name: FSB_LOG_ROOT, value: /var/log/fast-sandbox}
        - {name: FSB_CGROUP_ROOT, value: /host/cgroup}
        - {name: FSB_STATE_DIR, value: /var/lib/fast-sandbox}
        - {name: FSB_SLOT_ROOT, value: /var/lib/fast-sandbox/slots}
        - {name: FSB_HEALTH_SOCKET, value: /tmp/health.sock}
        - {name: FSB_TLS_CERT_FILE, value: /etc/fast-sandbox/tls/tls.crt}
        - {name: FSB_TLS_KEY_FILE, value: /etc/fast-sandbox/tls/tls.key}
        - {name: FSB_TLS_CA_FILE, value: /etc/fast-sandbox/tls/ca.crt}
        - {name: OTEL_SERVICE_NAME, value: agent}
      ports:
        - {name: agent, containerPort: 5758, protocol: TCP}
        - {name: metrics, containerPort: 9091, protocol: TCP}
      startupProbe: {exec: {command: [/agent, probe]}, periodSeconds: 1, failureThreshold: 60, timeoutSeconds: 10}
      readinessProbe: {exec: {command: [/agent, probe]}, periodSeconds: 30, failureThreshold: 2, timeoutSeconds: 10}
      livenessProbe: {exec: {command: [/agent, probe]}, periodSeconds: 30, failureThreshold: 2, timeoutSeconds: 10}
      securityContext:
        runAsUser: 0
        runAsNonRoot: false
        privileged: false
        readOnlyRootFilesystem: true
        seccompProfile: {type: RuntimeDefault}
        capabilities: {drop: [ALL], add: [CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, KILL, LINUX_IMMUTABLE, MKNOD, SETFCAP, SYS_ADMIN]}
`

func TestAgentPod(t *testing.T) {
	p := newPool()
	before := p.DeepCopy()
	got, err := injection().Pod(p, "py-agent-x")
	require.NoError(t, err)
	require.Empty(t, cmp.Diff(before, p), "the pool was modified")
	require.Len(t, got.Labels[v1alpha1.LabelTemplateHash], 10)
	var want corev1.Pod
	require.NoError(t, yaml.UnmarshalStrict([]byte(golden), &want))
	want.Labels[v1alpha1.LabelTemplateHash] = got.Labels[v1alpha1.LabelTemplateHash]
	require.Empty(t, cmp.Diff(&want, got))
}

func TestTemplateIsKept(t *testing.T) {
	got, err := injection().Pod(newPool(func(s *corev1.PodSpec) {
		s.TerminationGracePeriodSeconds = ptr.To(int64(5))
		s.RestartPolicy = corev1.RestartPolicyNever
		s.Volumes = []corev1.Volume{{Name: "mine"}}
		s.Containers[1].Env = []corev1.EnvVar{{Name: "AGENT_CAPACITY", Value: "1000"}, {Name: "OTEL_SERVICE_NAME", Value: "mine"}, {Name: "FSB_DOCKER_CONFIG", Value: "/c"}}
		s.Containers[1].SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true), Capabilities: &corev1.Capabilities{}}
		s.Containers[1].VolumeMounts = []corev1.VolumeMount{{Name: "mine", MountPath: "/run/containerd"}, {Name: "mine", MountPath: "/mine"}}
		s.Containers[1].LivenessProbe = &corev1.Probe{PeriodSeconds: 77}
		s.NodeSelector = map[string]string{"disk": "fast"}
	}), "py-agent-x")
	require.NoError(t, err)
	require.Equal(t, int64(5), *got.Spec.TerminationGracePeriodSeconds)
	require.Equal(t, corev1.RestartPolicyAlways, got.Spec.RestartPolicy)
	require.Equal(t, "mine", got.Spec.Volumes[0].Name)
	require.Equal(t, map[string]string{"disk": "fast"}, got.Spec.NodeSelector)
	c := got.Spec.Containers[1]
	env := map[string]string{}
	for _, e := range c.Env {
		require.NotContains(t, env, e.Name, "duplicate variable")
		env[e.Name] = e.Value
	}
	require.Equal(t, "7", env["AGENT_CAPACITY"], "the template overrides the identity of the agent")
	require.Equal(t, "mine", env["OTEL_SERVICE_NAME"])
	require.Equal(t, "/c", env["FSB_DOCKER_CONFIG"])
	require.True(t, *c.SecurityContext.Privileged)
	require.Empty(t, c.SecurityContext.Capabilities.Add)
	require.Equal(t, int32(77), c.LivenessProbe.PeriodSeconds)
	at := slices.IndexFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/run/containerd" })
	require.Equal(t, "fsb-containerd-run", c.VolumeMounts[at].Name)
	require.Equal(t, "/mine", c.VolumeMounts[0].MountPath)
}

func TestCPURequest(t *testing.T) {
	list := func(name corev1.ResourceName, value string) corev1.ResourceList {
		return corev1.ResourceList{name: resource.MustParse(value)}
	}
	for name, c := range map[string]struct{ template, want corev1.ResourceRequirements }{
		"none":           {corev1.ResourceRequirements{}, corev1.ResourceRequirements{Requests: list(corev1.ResourceCPU, "200m")}},
		"a request":      {corev1.ResourceRequirements{Requests: list(corev1.ResourceCPU, "50m")}, corev1.ResourceRequirements{Requests: list(corev1.ResourceCPU, "50m")}},
		"a limit":        {corev1.ResourceRequirements{Limits: list(corev1.ResourceCPU, "2")}, corev1.ResourceRequirements{Limits: list(corev1.ResourceCPU, "2")}},
		"limited memory": {corev1.ResourceRequirements{Limits: list(corev1.ResourceMemory, "2Gi")}, corev1.ResourceRequirements{Limits: list(corev1.ResourceMemory, "2Gi"), Requests: list(corev1.ResourceCPU, "200m")}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := injection().Pod(newPool(func(s *corev1.PodSpec) { s.Containers[1].Resources = c.template }), "py-agent-x")
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(c.want, got.Spec.Containers[1].Resources))
		})
	}
}

func TestInsecureAgentsHaveNoCertificate(t *testing.T) {
	i := injection()
	i.Insecure = true
	got, err := i.Pod(newPool(), "py-agent-x")
	require.NoError(t, err)
	for _, v := range got.Spec.Volumes {
		require.Nil(t, v.Secret)
	}
	require.Contains(t, got.Spec.Containers[1].Env, corev1.EnvVar{Name: "FSB_INSECURE", Value: "true"})
}

func TestInvalidTemplates(t *testing.T) {
	for name, tc := range map[string]struct {
		pool    *v1alpha1.SandboxPool
		message string
	}{
		"no agent":     {newPool(func(s *corev1.PodSpec) { s.Containers = s.Containers[:1] }), "containers: a container named agent is required"},
		"no container": {newPool(func(s *corev1.PodSpec) { s.Containers = nil }), "containers"},
		"no image":     {newPool(func(s *corev1.PodSpec) { s.Containers[1].Image = "" }), "containers[agent].image"},
		"host network": {newPool(func(s *corev1.PodSpec) { s.HostNetwork = true }), "hostNetwork"},
		"our volume":   {newPool(func(s *corev1.PodSpec) { s.Volumes = []corev1.Volume{{Name: "fsb-x"}} }), "fsb-x"},
		"bad name":     {func() *v1alpha1.SandboxPool { p := newPool(); p.Name = "a.b"; return p }(), "metadata.name"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := injection().Pod(tc.pool, "py-agent-x")
			require.ErrorContains(t, err, tc.message)
		})
	}
}

// TestTemplateHash: the hash changes if, and only if, a new Pod would be different.
func TestTemplateHash(t *testing.T) {
	hash := func(p *v1alpha1.SandboxPool, i pool.Injection) string {
		pod, err := i.Pod(p, "py-agent-x")
		require.NoError(t, err)
		return pod.Labels[v1alpha1.LabelTemplateHash]
	}
	base := hash(newPool(), injection())
	same := newPool()
	same.Spec.Capacity.PoolMax = 99
	same.Spec.Images = []string{"python"}
	same.Spec.TTLAfterFinished = &metav1.Duration{Duration: time.Minute}
	require.Equal(t, base, hash(same, injection()), "images and capacity are applied to running agents")
	require.Equal(t, base, hash(newPool(), injection()))
	require.NotEqual(t, base, hash(newPool(func(s *corev1.PodSpec) { s.Containers[1].Image = "agent:2" }), injection()))
	other := newPool()
	other.Spec.RuntimeHandler = "crun"
	require.NotEqual(t, base, hash(other, injection()))
	moved := injection()
	moved.ContainerdRoot = "/data/containerd"
	require.NotEqual(t, base, hash(newPool(), moved))
	seen := map[string]bool{base: true}
	for _, s := range []v1alpha1.PoolSlots{{Min: ptr.To(int32(1))}, {Max: ptr.To(int32(1))}, {Max: ptr.To(int32(0))}, {Min: ptr.To(int32(1)), Max: ptr.To(int32(1))}} {
		bounded := newPool()
		bounded.Spec.Slots = &s
		require.NotContains(t, seen, hash(bounded, injection()))
		seen[hash(bounded, injection())] = true
	}
	unbounded := newPool()
	unbounded.Spec.Slots = &v1alpha1.PoolSlots{}
	require.Equal(t, base, hash(unbounded, injection()), "empty bounds change the hash")
}

// TestUserNamespace: agents know the pool's choice, and the root of sandboxes, who is not that of the network's user namespace, can use all its
// ports. Agents of other handlers are not replaced by an update to a version with user namespaces.
func TestUserNamespace(t *testing.T) {
	const port, variable = "net.ipv4.ip_unprivileged_port_start", "FSB_USER_NAMESPACE"
	for _, c := range []struct {
		handler string
		policy  v1alpha1.UserNamespacePolicy
		env     string
		opened  bool
	}{
		{"fsb", v1alpha1.UserNamespaceAuto, "Auto", true},
		{"fsb", v1alpha1.UserNamespaceRequired, "Required", true},
		{"fsb", v1alpha1.UserNamespaceDisabled, "Disabled", false},
		{"fsb", "", "", false},
		{"runc", v1alpha1.UserNamespaceAuto, "", false},
		{"runc", v1alpha1.UserNamespaceRequired, "Required", false},
	} {
		t.Run(c.handler+" "+string(c.policy), func(t *testing.T) {
			p := newPool()
			p.Spec.RuntimeHandler, p.Spec.UserNamespace = c.handler, c.policy
			pod, err := injection().Pod(p, "py-agent-x")
			require.NoError(t, err)
			got := ""
			for _, e := range pod.Spec.Containers[1].Env {
				if e.Name == variable {
					got = e.Value
				}
			}
			require.Equal(t, c.env, got)
			if !c.opened {
				require.Nil(t, pod.Spec.SecurityContext)
				return
			}
			require.Equal(t, []corev1.Sysctl{{Name: port, Value: "0"}}, pod.Spec.SecurityContext.Sysctls)
		})
	}
	p := newPool(func(s *corev1.PodSpec) {
		s.SecurityContext = &corev1.PodSecurityContext{Sysctls: []corev1.Sysctl{{Name: port, Value: "80"}}}
	})
	p.Spec.RuntimeHandler, p.Spec.UserNamespace = "fsb", v1alpha1.UserNamespaceAuto
	pod, err := injection().Pod(p, "py-agent-x")
	require.NoError(t, err)
	require.Equal(t, []corev1.Sysctl{{Name: port, Value: "80"}}, pod.Spec.SecurityContext.Sysctls, "the template's")
}

// TestMaximumOfLimits: agents know the pool's maxima, whatever the template says.
func TestMaximumOfLimits(t *testing.T) {
	p := newPool(func(s *corev1.PodSpec) {
		s.Containers[1].Env = []corev1.EnvVar{{Name: "FSB_SANDBOX_MAX_PIDS", Value: "1000000"}}
	})
	base, err := injection().Pod(p, "py-agent-x")
	require.NoError(t, err)
	p.Spec.MaxSandboxResources = &v1alpha1.SandboxResources{Limits: corev1.ResourceList{"cpu": resource.MustParse("1500m"), "pids": resource.MustParse("100")}}
	pod, err := injection().Pod(p, "py-agent-x")
	require.NoError(t, err)
	require.NotEqual(t, base.Labels[v1alpha1.LabelTemplateHash], pod.Labels[v1alpha1.LabelTemplateHash])
	got := map[string]string{}
	for _, e := range pod.Spec.Containers[1].Env {
		if strings.HasPrefix(e.Name, "FSB_SANDBOX_MAX_") {
			require.NotContains(t, got, e.Name, "duplicate variable")
			got[e.Name] = e.Value
		}
	}
	require.Equal(t, map[string]string{"FSB_SANDBOX_MAX_CPU_MILLIS": "1500", "FSB_SANDBOX_MAX_PIDS": "100"}, got)
}

// TestImagePolicy: the template cannot weaken the pool's policy.
func TestImagePolicy(t *testing.T) {
	p := newPool(func(s *corev1.PodSpec) {
		s.Containers[1].Env = []corev1.EnvVar{{Name: "FSB_IMAGE_POLICY", Value: "Cached"}}
	})
	base, err := injection().Pod(p, "py-agent-x")
	require.NoError(t, err)
	p.Spec.ImagePolicy = v1alpha1.ImagePolicyCached // the default, which pools from before the field do not have
	cached, err := injection().Pod(p, "py-agent-x")
	require.NoError(t, err)
	require.Equal(t, base.Labels, cached.Labels)
	p.Spec.ImagePolicy = v1alpha1.ImagePolicyVerify
	verify, err := injection().Pod(p, "py-agent-x")
	require.NoError(t, err)
	require.NotEqual(t, base.Labels, verify.Labels)
	require.Contains(t, verify.Spec.Containers[1].Env, corev1.EnvVar{Name: "FSB_IMAGE_POLICY", Value: "Verify"})
	require.NotContains(t, verify.Spec.Containers[1].Env, corev1.EnvVar{Name: "FSB_IMAGE_POLICY", Value: "Cached"})
}

// TestAddedCapabilities: agents know what the pool adds, whatever the template says, and none is created for a pool that adds another one.
func TestAddedCapabilities(t *testing.T) {
	p := newPool(func(s *corev1.PodSpec) {
		s.Containers[1].Env = []corev1.EnvVar{{Name: "FSB_SANDBOX_ADD_CAPABILITIES", Value: "MKNOD"}}
	})
	of := func(names ...v1alpha1.Capability) *corev1.Pod {
		p.Spec.Security = &v1alpha1.PoolSecurity{AddCapabilities: names}
		pod, err := injection().Pod(p, "py-agent-x")
		require.NoError(t, err)
		return pod
	}
	base, err := injection().Pod(p, "py-agent-x")
	require.NoError(t, err)
	require.Equal(t, base.Labels, of().Labels, "none is the default")
	one, two, other := of(v1alpha1.CapabilityNetRaw), of(v1alpha1.CapabilityNetRaw, v1alpha1.CapabilityAuditWrite), of(v1alpha1.CapabilityAuditWrite, v1alpha1.CapabilityNetRaw)
	require.NotEqual(t, base.Labels, one.Labels)
	require.NotEqual(t, one.Labels, two.Labels)
	require.Equal(t, two.Labels, other.Labels, "the order")
	require.Contains(t, two.Spec.Containers[1].Env, corev1.EnvVar{Name: "FSB_SANDBOX_ADD_CAPABILITIES", Value: "AUDIT_WRITE,NET_RAW"})
	require.NotContains(t, two.Spec.Containers[1].Env, corev1.EnvVar{Name: "FSB_SANDBOX_ADD_CAPABILITIES", Value: "MKNOD"})
	p.Spec.Security.AddCapabilities = []v1alpha1.Capability{"SYS_ADMIN"}
	require.ErrorContains(t, injection().Check(p), `"SYS_ADMIN" cannot be added`)
}

// TestSlotBounds: the pool's bounds override its template. A bound that is not set is left to the agent.
func TestSlotBounds(t *testing.T) {
	for name, tc := range map[string]struct {
		slots *v1alpha1.PoolSlots
		want  map[string]string
	}{
		"unset":   {nil, map[string]string{"AGENT_SLOTS_MAX": "77"}},
		"empty":   {&v1alpha1.PoolSlots{}, map[string]string{"AGENT_SLOTS_MAX": "77"}},
		"off":     {&v1alpha1.PoolSlots{Max: ptr.To(int32(0))}, map[string]string{"AGENT_SLOTS_MAX": "0"}},
		"bounded": {&v1alpha1.PoolSlots{Min: ptr.To(int32(2)), Max: ptr.To(int32(5))}, map[string]string{"AGENT_SLOTS_MIN": "2", "AGENT_SLOTS_MAX": "5"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPool(func(s *corev1.PodSpec) {
				s.Containers[1].Env = []corev1.EnvVar{{Name: "AGENT_SLOTS_MAX", Value: "77"}}
			})
			p.Spec.Slots = tc.slots
			pod, err := injection().Pod(p, "py-agent-x")
			require.NoError(t, err)
			got := map[string]string{}
			for _, e := range pod.Spec.Containers[1].Env {
				if strings.HasPrefix(e.Name, "AGENT_SLOTS_") {
					require.NotContains(t, got, e.Name, "duplicate variable")
					got[e.Name] = e.Value
				}
			}
			require.Equal(t, tc.want, got)
		})
	}
}
