package admission

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/durationpb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Limits of durations, as of a create.
const (
	maxRecovery = 24 * time.Hour
	maxGrace    = time.Hour
	maxTTL      = 365 * 24 * time.Hour
)

// UpdateInPhase refuses an update that can have no effect on a sandbox. By seed 002 the phase Expired is left by deletion alone:
// an expired sandbox is kept for reference, so that labels, which help to find it, may change; a later expire time, a reset
// or another policy would be accepted and never act.
func UpdateInPhase(sb *v1alpha1.Sandbox, mask []string) error {
	if sb.Status.Phase != v1alpha1.PhaseExpired {
		return nil
	}
	for _, path := range mask {
		if path != "labels" {
			return fault.New(errdefs.ErrFailedPrecondition, fault.PhaseConflict,
				"sandbox %s/%s has expired: only its labels can be changed, not %s", sb.Namespace, sb.Name, path).With("phase", string(sb.Status.Phase))
		}
	}
	return nil
}

// paths are what an update may change, each with its change.
func paths() map[string]func(*v1alpha1.Sandbox, *v1alpha1.SandboxSpec, *sandboxv1.Sandbox) {
	type spec = v1alpha1.SandboxSpec
	return map[string]func(*v1alpha1.Sandbox, *spec, *sandboxv1.Sandbox){
		"spec.expire_time":    func(sb *v1alpha1.Sandbox, v *spec, _ *sandboxv1.Sandbox) { sb.Spec.ExpireTime = v.ExpireTime },
		"spec.failure_policy": func(sb *v1alpha1.Sandbox, v *spec, _ *sandboxv1.Sandbox) { sb.Spec.FailurePolicy = v.FailurePolicy },
		"spec.recovery_timeout": func(sb *v1alpha1.Sandbox, v *spec, _ *sandboxv1.Sandbox) {
			sb.Spec.RecoveryTimeoutSeconds = v.RecoveryTimeoutSeconds
		},
		"spec.termination_grace_period": func(sb *v1alpha1.Sandbox, v *spec, _ *sandboxv1.Sandbox) {
			sb.Spec.TerminationGracePeriodSeconds = v.TerminationGracePeriodSeconds
		},
		"spec.ttl_after_finished": func(sb *v1alpha1.Sandbox, v *spec, _ *sandboxv1.Sandbox) {
			sb.Spec.TTLAfterFinished = v.TTLAfterFinished
		},
		"spec.reset_revision": func(sb *v1alpha1.Sandbox, v *spec, _ *sandboxv1.Sandbox) { sb.Spec.ResetRevision = v.ResetRevision },
		"labels":              func(sb *v1alpha1.Sandbox, _ *spec, in *sandboxv1.Sandbox) { setLabels(sb, in.GetLabels()) },
	}
}

// Apply changes a custom resource as an admitted update asks.
func Apply(sb *v1alpha1.Sandbox, req *sandboxv1.UpdateSandboxRequest) {
	values := convert.SpecFromProto(req.GetSandbox().GetSpec())
	changes := paths()
	for _, path := range req.GetUpdateMask().GetPaths() {
		changes[path](sb, &values, req.GetSandbox())
	}
}

// setLabels replaces the caller's labels and keeps those of this project's group.
func setLabels(sb *v1alpha1.Sandbox, labels map[string]string) {
	next := map[string]string{}
	for k, v := range sb.Labels {
		if strings.HasPrefix(k, v1alpha1.Group+"/") {
			next[k] = v
		}
	}
	maps.Copy(next, without(labels))
	sb.Labels = next
}

// Update checks an update call.
func Update(req *sandboxv1.UpdateSandboxRequest, now time.Time) error {
	sb := req.GetSandbox()
	if sb.GetNamespace() == "" {
		return fault.Field("sandbox.namespace", "must be set")
	}
	if sb.GetName() == "" {
		return fault.Field("sandbox.name", "must be set")
	}
	mask := req.GetUpdateMask().GetPaths()
	if len(mask) == 0 {
		return fault.Field("update_mask", "must name at least one field")
	}
	known := paths()
	for _, path := range mask {
		if _, ok := known[path]; !ok {
			return fault.Field("update_mask", "%q cannot be changed", path)
		}
	}
	var err error
	if slices.Contains(mask, "labels") {
		err = validateLabels(without(sb.GetLabels()))
	}
	if err == nil {
		err = validateChange(sb.GetSpec(), mask, now)
	}
	var f *fault.Error
	if errors.As(err, &f) { // named as the caller of an update sees it
		name := "sandbox." + f.Metadata()[fault.FieldKey]
		return fault.Field(name, "%s", strings.TrimPrefix(f.Message(), strings.TrimPrefix(name, "sandbox.")+": "))
	}
	return err
}

// validateChange checks the fields of a spec that a mask names, by the rules of a create.
func validateChange(spec *sandboxv1.SandboxSpec, mask []string, now time.Time) error {
	only := &sandboxv1.SandboxSpec{}
	for _, path := range mask {
		switch path {
		case "spec.expire_time":
			only.ExpireTime = spec.GetExpireTime()
		case "spec.reset_revision":
			only.ResetRevision = spec.GetResetRevision()
		case "spec.failure_policy":
			if _, ok := sandboxv1.FailurePolicy_name[int32(spec.GetFailurePolicy())]; !ok {
				return fault.Field("spec.failure_policy", "unknown failure policy %d", spec.GetFailurePolicy())
			}
		case "spec.recovery_timeout":
			if err := validateDuration(path, spec.GetRecoveryTimeout(), maxRecovery); err != nil {
				return err
			}
		case "spec.termination_grace_period":
			if err := validateDuration(path, spec.GetTerminationGracePeriod(), maxGrace); err != nil {
				return err
			}
		case "spec.ttl_after_finished":
			if err := validateDuration(path, spec.GetTtlAfterFinished(), maxTTL); err != nil {
				return err
			}
		}
	}
	if err := validateTimes(only); err != nil {
		return err
	}
	return Expiry(only, now)
}

func validateDuration(path string, d *durationpb.Duration, limit time.Duration) error {
	if d == nil || d.CheckValid() == nil && d.AsDuration() >= 0 && d.AsDuration() <= limit {
		return nil
	}
	return fault.Field(path, "must be between 0s and %s", limit)
}

// without drops the keys of this project's group: a caller that read a sandbox and writes its labels back sends them, too.
func without(labels map[string]string) map[string]string {
	out := map[string]string{}
	for k, v := range labels {
		if !strings.HasPrefix(k, v1alpha1.Group+"/") {
			out[k] = v
		}
	}
	return out
}
