//go:build integration

package app_test

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

const goodSandbox = `
apiVersion: fast-sandbox.io/v1alpha1
kind: Sandbox
metadata: {name: good}
spec:
  image: busybox
  poolRef: pool
  command: [sleep]
  args: ["1"]
  envs: [{name: A, value: b}]
  workingDir: /tmp
  exposedPorts: [80, 443]
  expireTime: "2100-01-01T00:00:00Z"
  resources: {limits: {cpu: 500m, memory: 64Mi, pids: "10"}}
`

const goodPool = `
apiVersion: fast-sandbox.io/v1alpha1
kind: SandboxPool
metadata: {name: good}
spec:
  capacity: {poolMin: 1, poolMax: 2, bufferMin: 1, bufferMax: 2}
  sandboxResources: {limits: {cpu: "1", memory: 1Gi}}
  maxSandboxResources: {limits: {cpu: 1000m, pids: 4096}}
  security: {addCapabilities: [NET_RAW, MKNOD, AUDIT_WRITE]}
  agentTemplate: {spec: {containers: [{name: agent, image: a}]}}
`

// TestInvalidManifests sets one field of a valid manifest to an invalid value. The message names the field.
func TestInvalidManifests(t *testing.T) {
	env := newTestEnv(t)
	set := func(path ...string) func(any) func(map[string]any) {
		return func(v any) func(map[string]any) {
			return func(o map[string]any) {
				if v == nil {
					unstructured.RemoveNestedField(o, path...)
					return
				}
				require.NoError(t, unstructured.SetNestedField(o, v, path...))
			}
		}
	}
	list := func(v ...any) any { return v }
	for name, tc := range map[string]struct {
		manifest string
		change   func(map[string]any)
		message  string
	}{
		"image missing":           {goodSandbox, set("spec", "image")(nil), "spec.image"},
		"image empty":             {goodSandbox, set("spec", "image")(""), "spec.image"},
		"invalid pool":            {goodSandbox, set("spec", "poolRef")("Not_A_Label"), "spec.poolRef"},
		"port zero":               {goodSandbox, set("spec", "exposedPorts")(list(int64(0))), "spec.exposedPorts[0]"},
		"port too high":           {goodSandbox, set("spec", "exposedPorts")(list(int64(65536))), "spec.exposedPorts[0]"},
		"port twice":              {goodSandbox, set("spec", "exposedPorts")(list(int64(80), int64(80))), "spec.exposedPorts[1]"},
		"port not an int":         {goodSandbox, set("spec", "exposedPorts")(list("http")), "spec.exposedPorts[0]"},
		"relative working dir":    {goodSandbox, set("spec", "workingDir")("tmp"), "spec.workingDir"},
		"keepAlive and a command": {goodSandbox, set("spec", "keepAlive")(true), "command and args must be empty"},
		"unknown policy":          {goodSandbox, set("spec", "failurePolicy")("Sometimes"), "spec.failurePolicy"},
		"unknown mode":            {goodSandbox, set("spec", "consistencyMode")("Eventual"), "spec.consistencyMode"},
		"unknown network":         {goodSandbox, set("spec", "network")("Host"), "spec.network"},
		"invalid expire time":     {goodSandbox, set("spec", "expireTime")("tomorrow"), "spec.expireTime"},
		"negative recovery":       {goodSandbox, set("spec", "recoveryTimeoutSeconds")(int64(-1)), "spec.recoveryTimeoutSeconds"},
		"grace too long":          {goodSandbox, set("spec", "terminationGracePeriodSeconds")(int64(3601)), "spec.terminationGracePeriodSeconds"},
		"unknown resource":        {goodSandbox, set("spec", "resources", "limits")(map[string]any{"gpu": "1"}), "only cpu, memory and pids"},
		"variable without a name": {goodSandbox, set("spec", "envs")(list(map[string]any{"name": "", "value": "x"})), "spec.envs[0].name"},
		"variable with an equals": {goodSandbox, set("spec", "envs")(list(map[string]any{"name": "A=B", "value": "x"})), "spec.envs[0].name"},
		"name not a label":        {goodSandbox, set("metadata", "name")("a.b"), "DNS label"},

		"poolMin too large":    {goodPool, set("spec", "capacity", "poolMin")(int64(3)), "poolMin must not exceed poolMax"},
		"bufferMin too large":  {goodPool, set("spec", "capacity", "bufferMin")(int64(3)), "bufferMin must not exceed bufferMax"},
		"negative poolMin":     {goodPool, set("spec", "capacity", "poolMin")(int64(-1)), "spec.capacity.poolMin"},
		"no poolMax":           {goodPool, set("spec", "capacity", "poolMax")(nil), "spec.capacity.poolMax"},
		"no capacity":          {goodPool, set("spec", "maxSandboxesPerPod")(int64(0)), "spec.maxSandboxesPerPod"},
		"runtime with a slash": {goodPool, set("spec", "runtimeHandler")("a/b"), "spec.runtimeHandler"},
		"slots.min too large":  {goodPool, set("spec", "slots")(map[string]any{"min": int64(3), "max": int64(2)}), "slots.min must not exceed slots.max"},
		"negative slots":       {goodPool, set("spec", "slots")(map[string]any{"max": int64(-1)}), "spec.slots.max"},
		"no template":          {goodPool, set("spec", "agentTemplate")(nil), "spec.agentTemplate"},
		"maximum of zero":      {goodPool, set("spec", "maxSandboxResources")(map[string]any{"limits": map[string]any{"pids": "0"}}), "a maximum must be greater than 0"},
		"negative maximum":     {goodPool, set("spec", "maxSandboxResources")(map[string]any{"limits": map[string]any{"pids": int64(-1)}}), "a maximum must be greater than 0"},
		"default above the maximum": {
			goodPool, func(o map[string]any) {
				set("spec", "sandboxResources")(map[string]any{"limits": map[string]any{"cpu": "1", "memory": "1Gi"}})(o)
				set("spec", "maxSandboxResources")(map[string]any{"limits": map[string]any{"cpu": int64(1), "memory": "1023Mi"}})(o)
			}, "sandboxResources must not exceed maxSandboxResources",
		},
		"unknown image policy":  {goodPool, set("spec", "imagePolicy")("Always"), "spec.imagePolicy"},
		"capability of no pool": {goodPool, set("spec", "security", "addCapabilities")(list("SYS_ADMIN")), "spec.security.addCapabilities[0]"},
		"capability twice":      {goodPool, set("spec", "security", "addCapabilities")(list("MKNOD", "MKNOD")), "spec.security.addCapabilities[1]"},
		"unknown default limit": {goodPool, set("spec", "sandboxResources")(map[string]any{"limits": map[string]any{"disk": "1"}}), "only cpu, memory and pids"},
	} {
		t.Run(name, func(t *testing.T) {
			o := decode(t, tc.manifest)
			o.SetNamespace(env.namespace)
			tc.change(o.Object)
			err := kube.Create(t.Context(), o)
			require.Error(t, err)
			require.True(t, apierrors.IsInvalid(err) || apierrors.IsBadRequest(err), "%v", err)
			require.ErrorContains(t, err, tc.message)
		})
	}
	for _, good := range []string{goodSandbox, goodPool} {
		o := decode(t, good)
		o.SetNamespace(env.namespace)
		require.NoError(t, kube.Create(t.Context(), o), "the manifest that the others are derived from")
	}
}

// TestFixedFieldsCannotChange changes every field of the spec of an existing Sandbox. A new field fails the test until it is
// listed as fixed or as mutable.
func TestFixedFieldsCannotChange(t *testing.T) {
	env := newTestEnv(t)
	revision := time.Now().Truncate(time.Microsecond)
	microTime := func(d time.Duration) *metav1.MicroTime { return &metav1.MicroTime{Time: revision.Add(d)} }
	full := func() v1alpha1.SandboxSpec {
		return v1alpha1.SandboxSpec{
			Image: "busybox", PoolRef: "pool", Command: []string{"sleep"}, Args: []string{"1"}, Envs: []v1alpha1.EnvVar{{Name: "A", Value: "b"}},
			WorkingDir: "/tmp", ExposedPorts: []int32{80}, ConsistencyMode: v1alpha1.ConsistencyModeStrong,
			Network: v1alpha1.NetworkModeAgent, ResetRevision: microTime(0),
			Resources: &v1alpha1.SandboxResources{Limits: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}},
		}
	}
	type change = func(*v1alpha1.SandboxSpec)
	fixed := map[string][]change{
		"Image":        {func(s *v1alpha1.SandboxSpec) { s.Image = "other" }},
		"PoolRef":      {func(s *v1alpha1.SandboxSpec) { s.PoolRef = "other" }, func(s *v1alpha1.SandboxSpec) { s.PoolRef = "" }},
		"Command":      {func(s *v1alpha1.SandboxSpec) { s.Command = []string{"other"} }, func(s *v1alpha1.SandboxSpec) { s.Command = nil }},
		"Args":         {func(s *v1alpha1.SandboxSpec) { s.Args = []string{"2"} }, func(s *v1alpha1.SandboxSpec) { s.Args = nil }},
		"WorkingDir":   {func(s *v1alpha1.SandboxSpec) { s.WorkingDir = "/" }, func(s *v1alpha1.SandboxSpec) { s.WorkingDir = "" }},
		"KeepAlive":    {func(s *v1alpha1.SandboxSpec) { s.KeepAlive, s.Command, s.Args = true, nil, nil }},
		"ExposedPorts": {func(s *v1alpha1.SandboxSpec) { s.ExposedPorts = []int32{81} }, func(s *v1alpha1.SandboxSpec) { s.ExposedPorts = nil }},
		"Envs": {
			func(s *v1alpha1.SandboxSpec) { s.Envs[0].Value = "c" }, func(s *v1alpha1.SandboxSpec) { s.Envs = nil },
			func(s *v1alpha1.SandboxSpec) { s.Envs = append(s.Envs, v1alpha1.EnvVar{Name: "B"}) },
		},
		"ConsistencyMode": {
			func(s *v1alpha1.SandboxSpec) { s.ConsistencyMode = v1alpha1.ConsistencyModeFast },
			func(s *v1alpha1.SandboxSpec) { s.ConsistencyMode = "" },
		},
		"Network": {func(s *v1alpha1.SandboxSpec) { s.Network = v1alpha1.NetworkModeNone }},
		"Resources": {
			func(s *v1alpha1.SandboxSpec) { s.Resources.Limits[corev1.ResourceCPU] = resource.MustParse("2") },
			func(s *v1alpha1.SandboxSpec) { s.Resources.Limits[corev1.ResourceMemory] = resource.MustParse("1Gi") },
			func(s *v1alpha1.SandboxSpec) { s.Resources = nil },
		},
	}
	mutable := map[string][]change{
		"FailurePolicy":          {func(s *v1alpha1.SandboxSpec) { s.FailurePolicy = v1alpha1.FailurePolicyAutoRecreate }},
		"RecoveryTimeoutSeconds": {func(s *v1alpha1.SandboxSpec) { s.RecoveryTimeoutSeconds = ptr.To(int32(5)) }},
		"ExpireTime": {
			func(s *v1alpha1.SandboxSpec) { s.ExpireTime = &metav1.Time{Time: revision.Add(time.Hour)} },
			func(s *v1alpha1.SandboxSpec) { s.ExpireTime = nil },
		},
		"ResetRevision":                 {func(s *v1alpha1.SandboxSpec) { s.ResetRevision = microTime(time.Second) }},
		"TerminationGracePeriodSeconds": {func(s *v1alpha1.SandboxSpec) { s.TerminationGracePeriodSeconds = ptr.To(int64(60)) }},
		"TTLAfterFinished": {
			func(s *v1alpha1.SandboxSpec) { s.TTLAfterFinished = &metav1.Duration{Duration: time.Minute} },
			func(s *v1alpha1.SandboxSpec) { s.TTLAfterFinished = nil },
		},
	}
	forbidden := map[string][]change{ // of fields that can otherwise be changed
		"ResetRevision": {
			func(s *v1alpha1.SandboxSpec) { s.ResetRevision = microTime(-time.Second) },
			func(s *v1alpha1.SandboxSpec) { s.ResetRevision = nil },
		},
		"TTLAfterFinished": {func(s *v1alpha1.SandboxSpec) { s.TTLAfterFinished = &metav1.Duration{Duration: -time.Second} }},
	}
	update := func(s *v1alpha1.Sandbox, c change) error {
		old := s.DeepCopy()
		c(&s.Spec)
		require.NotEqual(t, old.Spec, s.Spec, "the test changes nothing")
		return kube.Patch(env.ctx, s, client.MergeFrom(old))
	}
	for field := range reflect.TypeFor[v1alpha1.SandboxSpec]().Fields() {
		_, isFixed := fixed[field.Name]
		_, isMutable := mutable[field.Name]
		require.True(t, isFixed != isMutable, "list %s as fixed or as mutable", field.Name)
		t.Run(field.Name, func(t *testing.T) {
			s := env.sandbox(strings.ToLower(field.Name), func(s *v1alpha1.Sandbox) { s.Spec = full() })
			for i, c := range slices.Concat(fixed[field.Name], forbidden[field.Name]) {
				err := update(env.get(s.Name), c)
				require.True(t, apierrors.IsInvalid(err), "change %d: %v", i, err)
			}
			for i, c := range mutable[field.Name] {
				require.NoError(t, update(env.get(s.Name), c), "change %d", i)
			}
		})
	}
	t.Run("added to a Sandbox without it", func(t *testing.T) {
		for name, changes := range fixed {
			if name == "Image" || name == "Network" { // always set
				continue
			}
			s := env.sandbox("without-"+strings.ToLower(name), func(s *v1alpha1.Sandbox) { s.Spec = v1alpha1.SandboxSpec{Image: "busybox"} })
			err := update(s, func(s *v1alpha1.SandboxSpec) {
				f := full()
				f.KeepAlive = true // which a Sandbox with a command cannot have
				reflect.ValueOf(s).Elem().FieldByName(name).Set(reflect.ValueOf(f).FieldByName(name))
			})
			require.True(t, apierrors.IsInvalid(err), "%s (%d changes): %v", name, len(changes), err)
		}
	})
	t.Run("written by a client that drops empty values", func(t *testing.T) {
		o := decode(t, goodSandbox)
		o.SetNamespace(env.namespace)
		o.SetName("empty")
		o.Object["spec"] = map[string]any{"image": "busybox", "poolRef": "", "command": []any{}, "args": []any{}, "envs": []any{}, "workingDir": "",
			"exposedPorts": []any{}, "resources": map[string]any{"limits": map[string]any{}}}
		require.NoError(t, kube.Create(env.ctx, o))
		s := env.get("empty")
		s.Spec.FailurePolicy = v1alpha1.FailurePolicyAutoRecreate
		require.NoError(t, kube.Update(env.ctx, s))
	})
	t.Run("quantity in another notation", func(t *testing.T) {
		o := decode(t, goodSandbox)
		o.SetNamespace(env.namespace)
		o.SetName("quantity")
		require.NoError(t, unstructured.SetNestedField(o.Object, map[string]any{"cpu": "0.5", "memory": "1024Mi", "pids": int64(10)}, "spec", "resources", "limits"))
		require.NoError(t, kube.Create(env.ctx, o))
		s := env.get("quantity")
		s.Spec.FailurePolicy = v1alpha1.FailurePolicyAutoRecreate
		require.NoError(t, kube.Update(env.ctx, s), "the client writes the same quantities as 500m and 1Gi")
	})
}

func decode(t *testing.T, manifest string) *unstructured.Unstructured {
	t.Helper()
	var o map[string]any
	require.NoError(t, yaml.Unmarshal([]byte(manifest), &o))
	return &unstructured.Unstructured{Object: o}
}
