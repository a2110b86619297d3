//go:build integration

package app_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
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
  agentTemplate: {spec: {containers: [{name: agent, image: a}]}}
`

// TestManifestsAreRefusedAtOnce sets one field of a good manifest to a bad value; the message must name the field.
func TestManifestsAreRefusedAtOnce(t *testing.T) {
	w := newWorld(t)
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
		"pool missing":            {goodSandbox, set("spec", "poolRef")(nil), "spec.poolRef"},
		"pool no label":           {goodSandbox, set("spec", "poolRef")("Not_A_Label"), "spec.poolRef"},
		"port zero":               {goodSandbox, set("spec", "exposedPorts")(list(int64(0))), "spec.exposedPorts[0]"},
		"port too high":           {goodSandbox, set("spec", "exposedPorts")(list(int64(65536))), "spec.exposedPorts[0]"},
		"port twice":              {goodSandbox, set("spec", "exposedPorts")(list(int64(80), int64(80))), "spec.exposedPorts[1]"},
		"port no number":          {goodSandbox, set("spec", "exposedPorts")(list("http")), "spec.exposedPorts[0]"},
		"relative working dir":    {goodSandbox, set("spec", "workingDir")("tmp"), "spec.workingDir"},
		"unknown policy":          {goodSandbox, set("spec", "failurePolicy")("Sometimes"), "spec.failurePolicy"},
		"unknown mode":            {goodSandbox, set("spec", "consistencyMode")("Eventual"), "spec.consistencyMode"},
		"unknown network":         {goodSandbox, set("spec", "network")("Host"), "spec.network"},
		"expire time no time":     {goodSandbox, set("spec", "expireTime")("tomorrow"), "spec.expireTime"},
		"negative recovery":       {goodSandbox, set("spec", "recoveryTimeoutSeconds")(int64(-1)), "spec.recoveryTimeoutSeconds"},
		"grace too long":          {goodSandbox, set("spec", "terminationGracePeriodSeconds")(int64(3601)), "spec.terminationGracePeriodSeconds"},
		"unknown resource":        {goodSandbox, set("spec", "resources", "limits")(map[string]any{"gpu": "1"}), "only cpu, memory and pids"},
		"variable without a name": {goodSandbox, set("spec", "envs")(list(map[string]any{"name": "", "value": "x"})), "spec.envs[0].name"},
		"variable with an equals": {goodSandbox, set("spec", "envs")(list(map[string]any{"name": "A=B", "value": "x"})), "spec.envs[0].name"},
		"name no DNS label":       {goodSandbox, set("metadata", "name")("a.b"), "DNS label"},

		"least above greatest":   {goodPool, set("spec", "capacity", "poolMin")(int64(3)), "poolMin must not exceed poolMax"},
		"buffer upside down":     {goodPool, set("spec", "capacity", "bufferMin")(int64(3)), "bufferMin must not exceed bufferMax"},
		"negative least":         {goodPool, set("spec", "capacity", "poolMin")(int64(-1)), "spec.capacity.poolMin"},
		"no greatest":            {goodPool, set("spec", "capacity", "poolMax")(nil), "spec.capacity.poolMax"},
		"agents without a place": {goodPool, set("spec", "maxSandboxesPerPod")(int64(0)), "spec.maxSandboxesPerPod"},
		"runtime with a slash":   {goodPool, set("spec", "runtimeHandler")("a/b"), "spec.runtimeHandler"},
		"slots upside down":      {goodPool, set("spec", "slots")(map[string]any{"min": int64(3), "max": int64(2)}), "slots.min must not exceed slots.max"},
		"slots below none":       {goodPool, set("spec", "slots")(map[string]any{"max": int64(-1)}), "spec.slots.max"},
		"no template":            {goodPool, set("spec", "agentTemplate")(nil), "spec.agentTemplate"},
		"unknown default limit":  {goodPool, set("spec", "sandboxResources")(map[string]any{"limits": map[string]any{"disk": "1"}}), "only cpu, memory and pids"},
	} {
		t.Run(name, func(t *testing.T) {
			o := decode(t, tc.manifest)
			o.SetNamespace(w.namespace)
			tc.change(o.Object)
			err := kube.Create(t.Context(), o)
			require.Error(t, err)
			require.True(t, apierrors.IsInvalid(err) || apierrors.IsBadRequest(err), "%v", err)
			require.ErrorContains(t, err, tc.message)
		})
	}
	for _, good := range []string{goodSandbox, goodPool} {
		o := decode(t, good)
		o.SetNamespace(w.namespace)
		require.NoError(t, kube.Create(t.Context(), o), "the manifest that the others derive from")
	}
}

// TestFixedFieldsCannotChange: a container cannot change, so neither can what it was made from.
func TestFixedFieldsCannotChange(t *testing.T) {
	w := newWorld(t)
	revision := time.Now().Truncate(time.Microsecond)
	good := decode(t, goodSandbox)
	good.SetNamespace(w.namespace)
	require.NoError(t, unstructured.SetNestedField(good.Object, revision.UTC().Format("2006-01-02T15:04:05.000000Z07:00"), "spec", "resetRevision"))
	require.NoError(t, kube.Create(w.ctx, good))
	for name, change := range map[string]func(*v1alpha1.Sandbox){
		"image":           func(s *v1alpha1.Sandbox) { s.Spec.Image = "other" },
		"pool":            func(s *v1alpha1.Sandbox) { s.Spec.PoolRef = "other" },
		"command":         func(s *v1alpha1.Sandbox) { s.Spec.Command = []string{"other"} },
		"no args":         func(s *v1alpha1.Sandbox) { s.Spec.Args = nil },
		"ports":           func(s *v1alpha1.Sandbox) { s.Spec.ExposedPorts = []int32{81} },
		"reset backwards": func(s *v1alpha1.Sandbox) { s.Spec.ResetRevision.Time = revision.Add(-time.Second) },
		"no reset":        func(s *v1alpha1.Sandbox) { s.Spec.ResetRevision = nil },
	} {
		t.Run(name, func(t *testing.T) {
			s := w.get("good")
			old := s.DeepCopy()
			change(s)
			require.True(t, apierrors.IsInvalid(kube.Patch(t.Context(), s, client.MergeFrom(old))))
		})
	}
	w.change("good", func(s *v1alpha1.Sandbox) {
		s.Spec.ResetRevision.Time = revision.Add(time.Second)
		s.Spec.FailurePolicy = v1alpha1.FailurePolicyAutoRecreate
		s.Spec.ExpireTime = nil
	})
}

func decode(t *testing.T, manifest string) *unstructured.Unstructured {
	t.Helper()
	var o map[string]any
	require.NoError(t, yaml.Unmarshal([]byte(manifest), &o))
	return &unstructured.Unstructured{Object: o}
}
