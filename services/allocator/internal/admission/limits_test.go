package admission_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/admission"
)

// TestStringLimits is about every string of a process, at and beyond what the kernel and the custom resource can hold.
func TestStringLimits(t *testing.T) {
	const longest = 131072
	fields := map[string]func(*sandboxv1.SandboxSpec, string){
		"spec.command":     func(s *sandboxv1.SandboxSpec, v string) { s.Command = []string{"sh", v} },
		"spec.args":        func(s *sandboxv1.SandboxSpec, v string) { s.Args = []string{"-c", v} },
		"spec.working_dir": func(s *sandboxv1.SandboxSpec, v string) { s.WorkingDir = v },
		"spec.env":         func(s *sandboxv1.SandboxSpec, v string) { s.Env = map[string]string{"A": v} },
	}
	values := map[string]struct {
		value string
		valid bool
	}{
		"empty":                     {"", true},
		"the longest":               {strings.Repeat("a", longest), true},
		"the longest in characters": {strings.Repeat("é", longest), true},
		"too long":                  {strings.Repeat("a", longest+1), false},
		"too long in characters":    {strings.Repeat("é", longest+1), false},
		"with a line break":         {"a\nb", true},
		"with a NUL":                {"a\x00", false},
	}
	for field, set := range fields {
		for name, test := range values {
			t.Run(field+" "+name, func(t *testing.T) {
				spec := &sandboxv1.SandboxSpec{Image: "busybox"}
				set(spec, test.value)
				_, err := admission.Create(&sandboxv1.CreateSandboxRequest{Spec: spec}, fast)
				if test.valid {
					require.NoError(t, err)
					return
				}
				require.Equal(t, fault.InvalidField, fault.ReasonOf(err))
				require.Equal(t, field, fieldOf(t, err))
			})
		}
	}
}

func TestKeepAliveHasNoCommand(t *testing.T) {
	create := func(command, args []string) error {
		_, err := admission.Create(&sandboxv1.CreateSandboxRequest{
			Spec: &sandboxv1.SandboxSpec{Image: "busybox", KeepAlive: true, Command: command, Args: args},
		}, fast)
		return err
	}
	require.NoError(t, create(nil, nil))
	for _, err := range []error{create([]string{"sh"}, nil), create(nil, []string{"-c"})} {
		require.Equal(t, fault.InvalidField, fault.ReasonOf(err))
		require.Equal(t, "spec.keep_alive", fieldOf(t, err))
	}
}

func TestVariableNames(t *testing.T) {
	for name, valid := range map[string]bool{"A": true, "a.b-c": true, "": false, "A=B": false, "=": false, "A\n": false, "A\x00": false} {
		_, err := admission.Create(&sandboxv1.CreateSandboxRequest{
			Spec: &sandboxv1.SandboxSpec{Image: "busybox", Env: map[string]string{name: "x"}},
		}, fast)
		require.Equal(t, valid, err == nil, "%q", name)
		if !valid {
			require.Equal(t, "spec.env", fieldOf(t, err))
		}
	}
}

// TestSizeLimit: what counts is the size as JSON, which the custom resource has; it may be six times that of the request.
func TestSizeLimit(t *testing.T) {
	tests := map[string]struct {
		text  string
		args  int
		valid bool
	}{
		"seven arguments":                {strings.Repeat("a", 131072), 7, true},
		"eight arguments":                {strings.Repeat("a", 131072), 8, false},
		"one of escaped characters":      {strings.Repeat("\x01", 131072), 1, true},
		"two of escaped characters":      {strings.Repeat("\x01", 131072), 2, false},
		"three of two bytes a character": {strings.Repeat("é", 131072), 3, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			spec := &sandboxv1.SandboxSpec{Image: "busybox"}
			for range test.args {
				spec.Args = append(spec.Args, test.text)
			}
			_, err := admission.Create(&sandboxv1.CreateSandboxRequest{Spec: spec}, fast)
			require.Equal(t, test.valid, err == nil, "%v", err)
			if !test.valid {
				require.Equal(t, fault.RequestTooLarge, fault.ReasonOf(err))
				require.Equal(t, "spec", fieldOf(t, err))
			}
		})
	}
}

// TestFirstLabelIsReported: the error does not depend on the order of a map.
func TestFirstLabelIsReported(t *testing.T) {
	for range 20 {
		_, err := admission.Create(&sandboxv1.CreateSandboxRequest{
			Spec: &sandboxv1.SandboxSpec{Image: "busybox"}, Labels: map[string]string{"c c": "", "b b": "", "a a": ""},
		}, fast)
		require.ErrorContains(t, err, `"a a"`)
	}
}

// TestMaskedFieldChangesAlone: an update that carries every field changes those that its mask names.
func TestMaskedFieldChangesAlone(t *testing.T) {
	later := now.Add(time.Hour)
	all := &sandboxv1.Sandbox{Labels: map[string]string{"new": "y"}, Spec: &sandboxv1.SandboxSpec{
		Image: "other", Pool: "other", Command: []string{"other"}, Args: []string{"other"}, Env: map[string]string{"other": ""}, WorkingDir: "/other", KeepAlive: true,
		Ports: []int32{1}, ExpireTime: timestamppb.New(later), FailurePolicy: sandboxv1.FailurePolicy_FAILURE_POLICY_AUTO_RECREATE,
		RecoveryTimeout: durationpb.New(time.Second), TerminationGracePeriod: durationpb.New(2 * time.Second),
		TtlAfterFinished: durationpb.New(3 * time.Second), ResetRevision: timestamppb.New(later),
	}}
	expire := metav1.NewTime(later)
	wants := map[string]func(*v1alpha1.Sandbox){
		"labels":              func(sb *v1alpha1.Sandbox) { sb.Labels = map[string]string{"new": "y"} },
		"spec.expire_time":    func(sb *v1alpha1.Sandbox) { sb.Spec.ExpireTime = &expire },
		"spec.failure_policy": func(sb *v1alpha1.Sandbox) { sb.Spec.FailurePolicy = v1alpha1.FailurePolicyAutoRecreate },
		"spec.recovery_timeout": func(sb *v1alpha1.Sandbox) {
			seconds := int32(1)
			sb.Spec.RecoveryTimeoutSeconds = &seconds
		},
		"spec.termination_grace_period": func(sb *v1alpha1.Sandbox) {
			seconds := int64(2)
			sb.Spec.TerminationGracePeriodSeconds = &seconds
		},
		"spec.ttl_after_finished": func(sb *v1alpha1.Sandbox) { sb.Spec.TTLAfterFinished = &metav1.Duration{Duration: 3 * time.Second} },
		"spec.reset_revision": func(sb *v1alpha1.Sandbox) {
			revision := metav1.NewMicroTime(later)
			sb.Spec.ResetRevision = &revision
		},
	}
	before := func() *v1alpha1.Sandbox {
		return &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"old": "x"}}, Spec: v1alpha1.SandboxSpec{Image: "busybox", PoolRef: "p"}}
	}
	for path, want := range wants {
		t.Run(path, func(t *testing.T) {
			got, expected := before(), before()
			req := update(all, path)
			require.NoError(t, admission.Update(req, now))
			admission.Apply(got, req)
			want(expected)
			require.Empty(t, cmp.Diff(expected, got))
		})
	}
}

// TestFixedFieldsHaveNoMask: what a sandbox is cannot be changed, whatever the mask calls it.
func TestFixedFieldsHaveNoMask(t *testing.T) {
	for _, path := range []string{"spec", "*", "name", "uid", "status", "spec.image", "spec.pool", "spec.env", "spec.ports", "spec.network", "Labels", "labels.a"} {
		err := admission.Update(update(&sandboxv1.Sandbox{}, "labels", path), now)
		require.Equal(t, fault.InvalidField, fault.ReasonOf(err), path)
		require.Equal(t, "update_mask", fieldOf(t, err), path)
	}
}

// TestUpdateInEachPhase: only an expired sandbox refuses, and only what could not act.
func TestUpdateInEachPhase(t *testing.T) {
	paths := []string{
		"labels", "spec.expire_time", "spec.failure_policy", "spec.recovery_timeout", "spec.reset_revision", "spec.termination_grace_period", "spec.ttl_after_finished",
	}
	phases := []v1alpha1.Phase{
		"", v1alpha1.PhasePending, v1alpha1.PhaseBound, v1alpha1.PhaseRunning, v1alpha1.PhaseTerminating, v1alpha1.PhaseExpired, v1alpha1.PhaseFailed,
	}
	for _, phase := range phases {
		for _, path := range paths {
			err := admission.UpdateInPhase(&v1alpha1.Sandbox{Status: v1alpha1.SandboxStatus{Phase: phase}}, []string{path})
			require.Equal(t, phase != v1alpha1.PhaseExpired || path == "labels", err == nil, "%s %s", phase, path)
		}
	}
}
