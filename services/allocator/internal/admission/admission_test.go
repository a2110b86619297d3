package admission_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/admission"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC) //nolint:gochecknoglobals // a constant

const (
	fast   = sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST
	strong = sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG
)

func fieldOf(t *testing.T, err error) string {
	t.Helper()
	var f *fault.Error
	require.ErrorAs(t, err, &f)
	return f.Metadata()[fault.FieldKey]
}

func TestCreate(t *testing.T) {
	create := func(change func(*sandboxv1.CreateSandboxRequest)) *sandboxv1.CreateSandboxRequest {
		r := &sandboxv1.CreateSandboxRequest{Spec: &sandboxv1.SandboxSpec{Image: "busybox"}}
		if change != nil {
			change(r)
		}
		return r
	}
	spec := func(change func(*sandboxv1.SandboxSpec)) *sandboxv1.CreateSandboxRequest {
		return create(func(r *sandboxv1.CreateSandboxRequest) { change(r.GetSpec()) })
	}
	tests := map[string]struct {
		req    *sandboxv1.CreateSandboxRequest
		field  string
		reason fault.Reason
	}{
		"good":               {create(nil), "", ""},
		"labels":             {create(func(r *sandboxv1.CreateSandboxRequest) { r.Labels = map[string]string{"team": "x"} }), "", ""},
		"image":              {spec(func(s *sandboxv1.SandboxSpec) { s.Image = "Not An Image" }), "spec.image", fault.InvalidField},
		"label's key":        {create(func(r *sandboxv1.CreateSandboxRequest) { r.Labels = map[string]string{"a b": ""} }), "labels", fault.InvalidField},
		"label of ours":      {create(func(r *sandboxv1.CreateSandboxRequest) { r.Labels = map[string]string{v1alpha1.LabelPool: "x"} }), "labels", fault.InvalidField},
		"time out of range":  {spec(func(s *sandboxv1.SandboxSpec) { s.ExpireTime = &timestamppb.Timestamp{Seconds: 1 << 60} }), "spec.expire_time", fault.InvalidField},
		"reset out of range": {spec(func(s *sandboxv1.SandboxSpec) { s.ResetRevision = &timestamppb.Timestamp{Nanos: -1} }), "spec.reset_revision", fault.InvalidField},
		"NUL in a command":   {spec(func(s *sandboxv1.SandboxSpec) { s.Command = []string{"a\x00b"} }), "spec.command", fault.InvalidField},
		"NUL in an argument": {spec(func(s *sandboxv1.SandboxSpec) { s.Args = []string{"a\x00b"} }), "spec.args", fault.InvalidField},
		"long argument":      {spec(func(s *sandboxv1.SandboxSpec) { s.Args = []string{strings.Repeat("a", 131073)} }), "spec.args", fault.InvalidField},
		"longest argument":   {spec(func(s *sandboxv1.SandboxSpec) { s.Args = []string{strings.Repeat("a", 131072)} }), "", ""},
		"name of a variable": {spec(func(s *sandboxv1.SandboxSpec) { s.Env = map[string]string{"a=b": ""} }), "spec.env", fault.InvalidField},
		"value of one":       {spec(func(s *sandboxv1.SandboxSpec) { s.Env = map[string]string{"a": "\x00"} }), "spec.env", fault.InvalidField},
		"too large": {spec(func(s *sandboxv1.SandboxSpec) {
			for range 9 {
				s.Args = append(s.Args, strings.Repeat("a", 131072))
			}
		}), "spec", fault.RequestTooLarge},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			plan, err := admission.Create(test.req, fast)
			require.Equal(t, test.reason, fault.ReasonOf(err))
			if test.reason != "" {
				require.Equal(t, test.field, fieldOf(t, err))
				return
			}
			require.Same(t, test.req, plan.Request)
			require.Equal(t, "docker.io/library/busybox:latest", plan.Image)
		})
	}
}

func TestModeOfCreate(t *testing.T) {
	for _, test := range []struct{ asked, fallback, want sandboxv1.ConsistencyMode }{
		{sandboxv1.ConsistencyMode_CONSISTENCY_MODE_UNSPECIFIED, strong, strong},
		{sandboxv1.ConsistencyMode_CONSISTENCY_MODE_UNSPECIFIED, fast, fast},
		{strong, fast, strong},
		{fast, strong, fast},
	} {
		plan, err := admission.Create(&sandboxv1.CreateSandboxRequest{Spec: &sandboxv1.SandboxSpec{Image: "x", ConsistencyMode: test.asked}}, test.fallback)
		require.NoError(t, err)
		require.Equal(t, test.want, plan.Mode)
	}
}

func TestExpiry(t *testing.T) {
	at := func(d time.Duration) *sandboxv1.SandboxSpec {
		return &sandboxv1.SandboxSpec{ExpireTime: timestamppb.New(now.Add(d))}
	}
	require.NoError(t, admission.Expiry(&sandboxv1.SandboxSpec{}, now))
	require.NoError(t, admission.Expiry(at(time.Nanosecond), now))
	for _, d := range []time.Duration{0, -time.Hour} {
		require.Equal(t, "spec.expire_time", fieldOf(t, admission.Expiry(at(d), now)))
	}
}

func update(sb *sandboxv1.Sandbox, paths ...string) *sandboxv1.UpdateSandboxRequest {
	sb.Namespace, sb.Name = "ns", "one"
	return &sandboxv1.UpdateSandboxRequest{Sandbox: sb, UpdateMask: &fieldmaskpb.FieldMask{Paths: paths}}
}

func TestUpdate(t *testing.T) {
	spec := func(s *sandboxv1.SandboxSpec) *sandboxv1.Sandbox { return &sandboxv1.Sandbox{Spec: s} }
	tests := map[string]struct {
		req   *sandboxv1.UpdateSandboxRequest
		field string
	}{
		"no namespace":          {&sandboxv1.UpdateSandboxRequest{Sandbox: &sandboxv1.Sandbox{Name: "one"}}, "sandbox.namespace"},
		"no name":               {&sandboxv1.UpdateSandboxRequest{Sandbox: &sandboxv1.Sandbox{Namespace: "ns"}}, "sandbox.name"},
		"no mask":               {update(&sandboxv1.Sandbox{}), "update_mask"},
		"a fixed field":         {update(&sandboxv1.Sandbox{}, "spec.image"), "update_mask"},
		"labels":                {update(&sandboxv1.Sandbox{Labels: map[string]string{"a": "b"}}, "labels"), ""},
		"labels read before":    {update(&sandboxv1.Sandbox{Labels: map[string]string{v1alpha1.LabelPool: "p"}}, "labels"), ""},
		"label":                 {update(&sandboxv1.Sandbox{Labels: map[string]string{"a b": ""}}, "labels"), "sandbox.labels"},
		"label not named":       {update(&sandboxv1.Sandbox{Labels: map[string]string{"a b": ""}}, "spec.expire_time"), ""},
		"past":                  {update(spec(&sandboxv1.SandboxSpec{ExpireTime: timestamppb.New(now)}), "spec.expire_time"), "sandbox.spec.expire_time"},
		"policy":                {update(spec(&sandboxv1.SandboxSpec{FailurePolicy: 9}), "spec.failure_policy"), "sandbox.spec.failure_policy"},
		"recovery":              {update(spec(&sandboxv1.SandboxSpec{RecoveryTimeout: durationpb.New(24 * time.Hour)}), "spec.recovery_timeout"), ""},
		"long recovery":         {update(spec(&sandboxv1.SandboxSpec{RecoveryTimeout: durationpb.New(25 * time.Hour)}), "spec.recovery_timeout"), "sandbox.spec.recovery_timeout"},
		"grace":                 {update(spec(&sandboxv1.SandboxSpec{TerminationGracePeriod: durationpb.New(time.Hour)}), "spec.termination_grace_period"), ""},
		"long grace":            {update(spec(&sandboxv1.SandboxSpec{TerminationGracePeriod: durationpb.New(time.Hour + 1)}), "spec.termination_grace_period"), "sandbox.spec.termination_grace_period"},
		"ttl":                   {update(spec(&sandboxv1.SandboxSpec{TtlAfterFinished: durationpb.New(0)}), "spec.ttl_after_finished"), ""},
		"negative ttl":          {update(spec(&sandboxv1.SandboxSpec{TtlAfterFinished: durationpb.New(-1)}), "spec.ttl_after_finished"), "sandbox.spec.ttl_after_finished"},
		"invalid duration":      {update(spec(&sandboxv1.SandboxSpec{TtlAfterFinished: &durationpb.Duration{Seconds: 1, Nanos: -1}}), "spec.ttl_after_finished"), "sandbox.spec.ttl_after_finished"},
		"unset fields, cleared": {update(&sandboxv1.Sandbox{}, "spec.expire_time", "spec.recovery_timeout", "spec.ttl_after_finished", "labels"), ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := admission.Update(test.req, now)
			if test.field == "" {
				require.NoError(t, err)
				return
			}
			require.Equal(t, fault.InvalidField, fault.ReasonOf(err))
			require.Equal(t, test.field, fieldOf(t, err))
		})
	}
}

func TestUpdateInPhase(t *testing.T) {
	expired := &v1alpha1.Sandbox{Status: v1alpha1.SandboxStatus{Phase: v1alpha1.PhaseExpired}}
	require.NoError(t, admission.UpdateInPhase(&v1alpha1.Sandbox{}, []string{"spec.expire_time"}))
	require.NoError(t, admission.UpdateInPhase(expired, []string{"labels"}))
	require.Equal(t, fault.PhaseConflict, fault.ReasonOf(admission.UpdateInPhase(expired, []string{"labels", "spec.reset_revision"})))
}

func TestApply(t *testing.T) {
	seconds, old := int64(5), metav1.NewTime(now)
	sb := &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"old": "x", v1alpha1.LabelPool: "p"}},
		Spec:       v1alpha1.SandboxSpec{Image: "busybox", ExpireTime: &old, TerminationGracePeriodSeconds: &seconds},
	}
	admission.Apply(sb, update(&sandboxv1.Sandbox{
		Labels: map[string]string{"new": "y", v1alpha1.LabelPool: "other"},
		Spec: &sandboxv1.SandboxSpec{
			Image: "ignored", FailurePolicy: sandboxv1.FailurePolicy_FAILURE_POLICY_AUTO_RECREATE, TtlAfterFinished: durationpb.New(time.Minute),
			RecoveryTimeout: durationpb.New(time.Second), ResetRevision: timestamppb.New(now),
		},
	}, "labels", "spec.expire_time", "spec.failure_policy", "spec.recovery_timeout", "spec.reset_revision", "spec.termination_grace_period", "spec.ttl_after_finished"))
	require.Equal(t, map[string]string{"new": "y", v1alpha1.LabelPool: "p"}, sb.Labels)
	require.Equal(t, "busybox", sb.Spec.Image)
	require.Nil(t, sb.Spec.ExpireTime, "a named field that is unset is cleared")
	require.Nil(t, sb.Spec.TerminationGracePeriodSeconds)
	require.Equal(t, v1alpha1.FailurePolicyAutoRecreate, sb.Spec.FailurePolicy)
	require.Equal(t, int32(1), *sb.Spec.RecoveryTimeoutSeconds)
	require.Equal(t, time.Minute, sb.Spec.TTLAfterFinished.Duration)
	require.True(t, sb.Spec.ResetRevision.Time.Equal(now))
}
