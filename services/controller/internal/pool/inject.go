package pool

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

const (
	agentContainer = "agent"
	tlsPath        = "/etc/fast-sandbox/tls"
	// cgroupPath is where the host's cgroups are mounted in an agent; its /sys/fs/cgroup has only its own.
	cgroupPath = "/host/cgroup"
	// statePath is where an agent keeps what has to survive a restart of its process, but not its Pod: terms, tombstones, pinned
	// images, and whether it is draining.
	statePath   = "/var/lib/fast-sandbox"
	metricsPort = 9091
	// healthSocket is the unix socket on which an agent answers probes. Sandboxes share the agent's network, and not its files.
	healthSocket = "/tmp/health.sock"
	// volumePrefix is the prefix of the names of injected volumes. A template must not use it.
	volumePrefix = "fsb-"
	// tlsVolume is the volume with the agent's certificate.
	tlsVolume = volumePrefix + "tls"
	// graceSeconds is how long an agent has to complete its calls. Its sandboxes are removed by the controller or the janitor.
	graceSeconds = 30
)

// Injection is what is added to the template in every agent Pod.
type Injection struct {
	// AgentPort is the port of the agent's gRPC server.
	AgentPort int32
	// ContainerdSocket is the path of containerd's socket on the node, and ContainerdRoot that of its root directory. Both have
	// the same path in the Pod, because containerd and the agent exchange paths.
	ContainerdSocket, ContainerdRoot string
	// LogRoot is the directory of the sandboxes' logs, on the node and in the Pod.
	LogRoot string
	// SlotRoot is the directory of the sockets of slots, on the node and in the Pod.
	SlotRoot string
	// Insecure makes agents serve without TLS.
	Insecure bool
	// Env are the telemetry settings of agents, unless their template sets them.
	Env []corev1.EnvVar
}

// templateError is why no agent can be created until the pool is changed.
type templateError struct{ reason, message string }

// Error returns the message.
func (e *templateError) Error() string { return e.message }

// Check validates a pool's template. Its error is a *templateError.
func (i Injection) Check(p *v1alpha1.SandboxPool) error {
	spec := &p.Spec.AgentTemplate.Spec
	at := slices.IndexFunc(spec.Containers, func(c corev1.Container) bool { return c.Name == agentContainer })
	switch {
	case len(validation.IsDNS1123Label(p.Name)) > 0: // it is the value of a label, and of poolRef
		return &templateError{"InvalidName", "metadata.name: the name of a SandboxPool must be a DNS label: at most 63 lower-case letters, digits and dashes"}
	case at < 0:
		return &templateError{"InvalidTemplate", "spec.agentTemplate.spec.containers: a container named agent is required"}
	case spec.Containers[at].Image == "":
		return &templateError{"InvalidTemplate", "spec.agentTemplate.spec.containers[agent].image is required"}
	case spec.HostNetwork:
		return &templateError{"InvalidTemplate", "spec.agentTemplate.spec.hostNetwork: the sandboxes of an agent share its network, which must not be the node's"}
	}
	for _, c := range p.Spec.AddedCapabilities() { // the resource definition of another version may let others through
		switch c {
		case v1alpha1.CapabilityNetRaw, v1alpha1.CapabilityMknod, v1alpha1.CapabilityAuditWrite:
		default:
			return &templateError{"InvalidCapability", fmt.Sprintf("spec.security.addCapabilities: %q cannot be added; use only NET_RAW, MKNOD, AUDIT_WRITE", c)}
		}
	}
	for _, v := range spec.Volumes {
		if len(v.Name) >= len(volumePrefix) && v.Name[:len(volumePrefix)] == volumePrefix {
			return &templateError{"InvalidTemplate", fmt.Sprintf("spec.agentTemplate.spec.volumes: the name %s is reserved for the controller", v.Name)}
		}
	}
	return nil
}

// maxNameBase bounds the part of a Pod's name that comes from the pool, as the API server does for generated names.
const maxNameBase = 58

// podName returns a name for a new agent Pod of a pool. This controller chooses it, and not the API server, because the Pod mounts a
// Secret that is named after it.
func podName(p *v1alpha1.SandboxPool) string {
	base := generateName(p)
	return base[:min(len(base), maxNameBase)] + rand.String(5)
}

func generateName(p *v1alpha1.SandboxPool) string { return p.Name + "-agent-" }

// Pod returns a new agent Pod of a pool, which shares no memory with the pool.
func (i Injection) Pod(p *v1alpha1.SandboxPool, name string) (*corev1.Pod, error) {
	if err := i.Check(p); err != nil {
		return nil, err
	}
	template := p.Spec.AgentTemplate.DeepCopy()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.Namespace, Name: name, GenerateName: generateName(p),
			Labels: map[string]string{}, Annotations: template.Metadata.Annotations,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(p, v1alpha1.GroupVersion.WithKind("SandboxPool"))},
		},
		Spec: template.Spec,
	}
	maps.Copy(pod.Labels, template.Metadata.Labels)
	maps.Copy(pod.Labels, selector(p))
	pod.Labels[v1alpha1.LabelTemplateHash] = templateHash(p, i)

	s := &pod.Spec
	s.RestartPolicy = corev1.RestartPolicyAlways
	s.AutomountServiceAccountToken = ptr.To(false) // agents do not use the API server
	s.EnableServiceLinks = ptr.To(false)
	s.HostPID = true // to read the signal masks of sandboxes, and to kill processes that a crashed containerd or runc has left
	if s.TerminationGracePeriodSeconds == nil {
		s.TerminationGracePeriodSeconds = ptr.To(int64(graceSeconds))
	}
	openPorts(p, s)
	mounts := i.volumes(s, name)
	for at := range s.Containers {
		if s.Containers[at].Name == agentContainer {
			i.container(&s.Containers[at], p, mounts)
		}
	}
	return pod, nil
}

// unprivilegedPorts is the first port that needs no privilege. It belongs to the Pod's network namespace.
const unprivilegedPorts = "net.ipv4.ip_unprivileged_port_start"

// openPorts lets sandboxes use all ports of the Pod's network: their root is not that of the user namespace that the network belongs to.
func openPorts(p *v1alpha1.SandboxPool, s *corev1.PodSpec) {
	if !mayHaveUsers(p) {
		return
	}
	s.SecurityContext = cmpOr(s.SecurityContext, &corev1.PodSecurityContext{})
	if !slices.ContainsFunc(s.SecurityContext.Sysctls, func(c corev1.Sysctl) bool { return c.Name == unprivilegedPorts }) {
		s.SecurityContext.Sysctls = append(s.SecurityContext.Sysctls, corev1.Sysctl{Name: unprivilegedPorts, Value: "0"})
	}
}

// mayHaveUsers reports whether the sandboxes of a pool have user namespaces where the node can do that.
func mayHaveUsers(p *v1alpha1.SandboxPool) bool {
	u := p.Spec.UserNamespace
	return p.Spec.RuntimeHandler == handlerWithUsers && u != "" && u != v1alpha1.UserNamespaceDisabled
}

func (i Injection) container(c *corev1.Container, p *v1alpha1.SandboxPool, mounts []corev1.VolumeMount) {
	for _, m := range mounts {
		c.VolumeMounts = slices.DeleteFunc(c.VolumeMounts, func(old corev1.VolumeMount) bool { return old.MountPath == m.MountPath })
		c.VolumeMounts = append(c.VolumeMounts, m)
	}
	i.env(c, p)
	ports := []corev1.ContainerPort{{Name: "agent", ContainerPort: i.AgentPort}, {Name: "metrics", ContainerPort: metricsPort}}
	for _, port := range ports {
		port.Protocol = corev1.ProtocolTCP
		c.Ports = slices.DeleteFunc(c.Ports, func(old corev1.ContainerPort) bool {
			return old.Name == port.Name || old.ContainerPort == port.ContainerPort
		})
		c.Ports = append(c.Ports, port)
	}
	probe := func(period, failures int32) *corev1.Probe {
		return &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"/agent", "probe"}}},
			PeriodSeconds: period, FailureThreshold: failures, TimeoutSeconds: 10}
	}
	// With a startup probe, a new agent is ready soon although the other probes have long periods: each is a process.
	c.StartupProbe = cmpOr(c.StartupProbe, probe(1, 60))
	c.ReadinessProbe = cmpOr(c.ReadinessProbe, probe(30, 2))
	c.LivenessProbe = cmpOr(c.LivenessProbe, probe(30, 2))
	if c.SecurityContext == nil {
		c.SecurityContext = &corev1.SecurityContext{}
	}
	secure(c.SecurityContext)
	request(&c.Resources)
}

// defaultCPU is requested for an agent whose template neither requests nor limits processor time. Its sandboxes have that share of a busy
// node: they are in the cgroup of its Pod, whose weight is the sum of its requests. Without any they would wait for all other Pods.
const defaultCPU = "200m"

func request(r *corev1.ResourceRequirements) {
	_, limited := r.Limits[corev1.ResourceCPU] // without a request, the limit is one
	if _, ok := r.Requests[corev1.ResourceCPU]; ok || limited {
		return
	}
	if r.Requests == nil {
		r.Requests = corev1.ResourceList{}
	}
	r.Requests[corev1.ResourceCPU] = resource.MustParse(defaultCPU)
}

// secure fills in what the template does not set. The agent runs as root, because containerd's socket and directories belong
// to root. It needs SYS_ADMIN to mount the root file systems of sandboxes that claim a slot, and image layers to read
// /etc/passwd. It needs the other capabilities to access files of any user of an image: an overlay file system accesses its
// layers with the capabilities of the process that mounted it.
func secure(s *corev1.SecurityContext) {
	s.RunAsUser = cmpOr(s.RunAsUser, ptr.To(int64(0)))
	s.RunAsNonRoot = cmpOr(s.RunAsNonRoot, ptr.To(false))
	s.Privileged = cmpOr(s.Privileged, ptr.To(false))
	s.ReadOnlyRootFilesystem = cmpOr(s.ReadOnlyRootFilesystem, ptr.To(true))
	s.SeccompProfile = cmpOr(s.SeccompProfile, &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault})
	s.Capabilities = cmpOr(s.Capabilities, &corev1.Capabilities{
		Drop: []corev1.Capability{"ALL"},
		Add:  []corev1.Capability{"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "LINUX_IMMUTABLE", "MKNOD", "SETFCAP", "SYS_ADMIN"},
	})
}

// volumes adds the volumes to a Pod, and returns the agent's mounts.
func (i Injection) volumes(s *corev1.PodSpec, pod string) []corev1.VolumeMount {
	host := func(name, path string, kind corev1.HostPathType) {
		s.Volumes = append(s.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
			HostPath: &corev1.HostPathVolumeSource{Path: path, Type: &kind}}})
	}
	// The directory of the socket, because containerd creates a new socket when it restarts.
	socketDir := filepath.Dir(i.ContainerdSocket)
	host("fsb-containerd-run", socketDir, corev1.HostPathDirectory)
	host("fsb-containerd-root", i.ContainerdRoot, corev1.HostPathDirectory)
	host("fsb-logs", i.LogRoot, corev1.HostPathDirectoryOrCreate)
	host("fsb-cgroup", "/sys/fs/cgroup", corev1.HostPathDirectory)
	host("fsb-slots", i.SlotRoot, corev1.HostPathDirectoryOrCreate)
	for _, name := range []string{"fsb-state", "fsb-tmp"} {
		s.Volumes = append(s.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}})
	}
	mounts := []corev1.VolumeMount{
		{Name: "fsb-containerd-run", MountPath: socketDir},
		{Name: "fsb-containerd-root", MountPath: i.ContainerdRoot},
		{Name: "fsb-logs", MountPath: i.LogRoot},
		{Name: "fsb-cgroup", MountPath: cgroupPath},
		{Name: "fsb-state", MountPath: statePath},
		{Name: "fsb-slots", MountPath: i.SlotRoot}, // by default below statePath
		{Name: "fsb-tmp", MountPath: "/tmp"},
	}
	if !i.Insecure {
		s.Volumes = append(s.Volumes, corev1.Volume{Name: tlsVolume, VolumeSource: corev1.VolumeSource{
			Secret: &corev1.SecretVolumeSource{SecretName: secretName(pod), DefaultMode: ptr.To(int32(0o400))}}})
		mounts = append(mounts, corev1.VolumeMount{Name: tlsVolume, MountPath: tlsPath, ReadOnly: true})
	}
	return mounts
}

// env sets the agent's environment. The identity of the agent overrides the template; the telemetry settings do not.
func (i Injection) env(c *corev1.Container, p *v1alpha1.SandboxPool) {
	field := func(name, path string) corev1.EnvVar {
		return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: path}}}
	}
	value := func(name, v string) corev1.EnvVar { return corev1.EnvVar{Name: name, Value: v} }
	ours := []corev1.EnvVar{
		field("POD_NAME", "metadata.name"), field("POD_NAMESPACE", "metadata.namespace"), field("POD_UID", "metadata.uid"),
		field("POD_IP", "status.podIP"), field("NODE_NAME", "spec.nodeName"),
		value("AGENT_POOL", p.Name),
		value("AGENT_CAPACITY", strconv.Itoa(perAgent(p))),
		value("AGENT_RUNTIME_HANDLER", p.Spec.RuntimeHandler),
		value("CONTAINERD_SOCKET", i.ContainerdSocket),
		value("FSB_BIND_ADDRESS", ":"+strconv.Itoa(int(i.AgentPort))),
		value("FSB_LOG_ROOT", i.LogRoot),
		value("FSB_CGROUP_ROOT", cgroupPath),
		value("FSB_STATE_DIR", statePath),
		value("FSB_SLOT_ROOT", i.SlotRoot),
		value("FSB_HEALTH_SOCKET", healthSocket),
	}
	ours = append(ours, optional(p)...)
	if i.Insecure {
		ours = append(ours, value("FSB_INSECURE", "true"))
	} else {
		ours = append(ours, value("FSB_TLS_CERT_FILE", tlsPath+"/tls.crt"), value("FSB_TLS_KEY_FILE", tlsPath+"/tls.key"), value("FSB_TLS_CA_FILE", tlsPath+"/ca.crt"))
	}
	has := func(name string) func(corev1.EnvVar) bool {
		return func(e corev1.EnvVar) bool { return e.Name == name }
	}
	for _, e := range ours {
		c.Env = append(slices.DeleteFunc(c.Env, has(e.Name)), e)
	}
	for _, e := range i.Env {
		if !slices.ContainsFunc(c.Env, has(e.Name)) {
			c.Env = append(c.Env, e)
		}
	}
}

// optional returns the environment variables for what the pool sets beyond the defaults: bounds of slots and of the limits of
// sandboxes, the image policy, and capabilities.
func optional(p *v1alpha1.SandboxPool) []corev1.EnvVar {
	var out []corev1.EnvVar
	add := func(name string, n int64) {
		out = append(out, corev1.EnvVar{Name: name, Value: strconv.FormatInt(n, 10)})
	}
	if s := p.Spec.Slots; s != nil && s.Min != nil {
		add("AGENT_SLOTS_MIN", int64(*s.Min))
	}
	if s := p.Spec.Slots; s != nil && s.Max != nil {
		add("AGENT_SLOTS_MAX", int64(*s.Max))
	}
	maximum := convert.LimitsToProto(p.Spec.MaxSandboxResources)
	for _, limit := range []struct {
		name  string
		value int64
	}{
		{"FSB_SANDBOX_MAX_CPU_MILLIS", maximum.GetCpuMillis()}, {"FSB_SANDBOX_MAX_MEMORY_BYTES", maximum.GetMemoryBytes()},
		{"FSB_SANDBOX_MAX_PIDS", maximum.GetPids()},
	} {
		if limit.value > 0 {
			add(limit.name, limit.value)
		}
	}
	if p.Spec.ImagePolicy == v1alpha1.ImagePolicyVerify {
		out = append(out, corev1.EnvVar{Name: "FSB_IMAGE_POLICY", Value: string(p.Spec.ImagePolicy)})
	}
	// Other handlers have none; without the variable the hash of their agents is that of versions before user namespaces.
	if u := p.Spec.UserNamespace; u == v1alpha1.UserNamespaceRequired || u != "" && p.Spec.RuntimeHandler == handlerWithUsers {
		out = append(out, corev1.EnvVar{Name: "FSB_USER_NAMESPACE", Value: string(u)})
	}
	if added := p.Spec.AddedCapabilities(); len(added) > 0 {
		names := make([]string, 0, len(added))
		for _, c := range added {
			names = append(names, string(c))
		}
		slices.Sort(names) // the order is not a difference
		out = append(out, corev1.EnvVar{Name: "FSB_SANDBOX_ADD_CAPABILITIES", Value: strings.Join(names, ",")})
	}
	return out
}

// handlerWithUsers is the runtime handler whose sandboxes can have user namespaces.
const handlerWithUsers = "fsb"

// templateHash returns a hash of what an agent Pod is created from: the template, and what is injected into it. The pool's images
// are not part of it, because agents can change them while they run.
func templateHash(p *v1alpha1.SandboxPool, i Injection) string {
	parts := []any{p.Spec.AgentTemplate, perAgent(p), p.Spec.RuntimeHandler, i}
	if set := optional(p); len(set) > 0 { // otherwise the hash is that of versions without such fields
		parts = append(parts, set)
	}
	raw, err := json.Marshal(parts)
	if err != nil { // all of it was decoded from JSON
		panic(err)
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:5])
}

func cmpOr[T any](a, b *T) *T {
	if a != nil {
		return a
	}
	return b
}
