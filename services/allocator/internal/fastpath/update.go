package fastpath

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// UpdateSandbox implements sandboxv1.SandboxServiceServer. A sandbox whose custom resource is still to be written is waited
// for.
func (s *Server) UpdateSandbox(ctx context.Context, req *sandboxv1.UpdateSandboxRequest) (*sandboxv1.UpdateSandboxResponse, error) {
	if err := s.validateUpdate(req); err != nil {
		return nil, err
	}
	key := store.Key{Namespace: req.GetSandbox().GetNamespace(), Name: req.GetSandbox().GetName()}
	unlock, err := s.locks.Lock(ctx, key)
	if err != nil {
		return nil, errContext(ctx, "waiting for other work on the sandbox", nil)
	}
	defer unlock()
	item, err := s.find(ctx, key)
	uid := req.GetSandbox().GetUid()
	switch {
	case err != nil:
		return nil, err
	case uid != "" && uid != item.Sandbox.GetUid():
		return nil, errOther(key, item.Sandbox.GetUid())
	case item.Sandbox.GetDeleteTime() != nil:
		return nil, errTerminating(key)
	}
	if err := s.awaitWritten(ctx, item); err != nil {
		return nil, err
	}
	updated, err := s.update(ctx, item, req)
	if err != nil {
		return nil, err
	}
	s.store.SetResource(updated)
	if now, ok := s.store.Get(key); ok && now.Sandbox.GetUid() == item.Sandbox.GetUid() {
		return &sandboxv1.UpdateSandboxResponse{Sandbox: now.Sandbox}, nil
	}
	return &sandboxv1.UpdateSandboxResponse{Sandbox: convert.ToProto(updated)}, nil
}

// awaitWritten waits until the custom resource of a sandbox is written.
func (s *Server) awaitWritten(ctx context.Context, item store.Item) error {
	if item.Resource != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, apiPatience)
	defer cancel()
	job, ok := s.job(item.Sandbox.GetUid())
	if !ok {
		if now, ok := s.store.Get(item.Key); ok && now.Resource != nil {
			return nil
		}
		return fault.New(errdefs.ErrUnavailable, fault.APIUnavailable, "sandbox %s is still being adopted", item.Key).RetryIn(time.Second)
	}
	if _, _, err := job.Wait(ctx); err != nil {
		return fault.Wrap(err, errdefs.ErrUnavailable, fault.APIUnavailable, "sandbox %s is not written to the API server yet", item.Key).
			RetryIn(time.Second)
	}
	return nil
}

func (s *Server) update(ctx context.Context, item store.Item, req *sandboxv1.UpdateSandboxRequest) (*v1alpha1.Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, apiPatience)
	defer cancel()
	current := &v1alpha1.Sandbox{}
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if err := s.config.Resources.Get(ctx, client.ObjectKey{Namespace: item.Key.Namespace, Name: item.Key.Name}, current); err != nil {
			return err
		}
		switch {
		case current.EffectiveUID() != item.Sandbox.GetUid():
			return s.missing(item.Key)
		case current.DeletionTimestamp != nil:
			return errTerminating(item.Key)
		}
		if err := allowed(current, item.Key, req.GetUpdateMask().GetPaths()); err != nil {
			return err
		}
		apply(current, req)
		return s.config.Resources.Update(ctx, current)
	})
	var f *fault.Error
	switch {
	case err == nil:
		return current, nil
	case errors.As(err, &f):
		return nil, err
	case apierrors.IsNotFound(err):
		return nil, s.missing(item.Key)
	case apierrors.IsInvalid(err):
		return nil, invalid(err, "sandbox.spec")
	case apierrors.IsConflict(err):
		return nil, fault.Wrap(err, errdefs.ErrUnavailable, fault.APIUnavailable, "sandbox %s changes too fast", item.Key).RetryIn(time.Second)
	}
	return nil, errAPI(err)
}

// allowed refuses what an expired sandbox cannot have any more. By seed 002 the phase Expired is left by deletion alone: it
// is kept for reference, so that labels, which help to find it, may change; a later expire time, a reset or another policy
// would be accepted and never come true.
func allowed(sb *v1alpha1.Sandbox, key store.Key, mask []string) error {
	if sb.Status.Phase != v1alpha1.PhaseExpired {
		return nil
	}
	for _, path := range mask {
		if path != "labels" {
			return fault.New(errdefs.ErrFailedPrecondition, fault.PhaseConflict,
				"sandbox %s has expired: %s cannot be changed any more, only labels can", key, path).With("phase", string(sb.Status.Phase))
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
		"spec.reset_revision": func(sb *v1alpha1.Sandbox, v *spec, _ *sandboxv1.Sandbox) { sb.Spec.ResetRevision = v.ResetRevision },
		"labels":              func(sb *v1alpha1.Sandbox, _ *spec, in *sandboxv1.Sandbox) { setLabels(sb, in.GetLabels()) },
	}
}

func apply(sb *v1alpha1.Sandbox, req *sandboxv1.UpdateSandboxRequest) {
	values := convert.SpecFromProto(req.GetSandbox().GetSpec())
	changes := paths()
	for _, path := range req.GetUpdateMask().GetPaths() {
		changes[path](sb, &values, req.GetSandbox())
	}
}

// setLabels replaces the caller's labels and keeps ours.
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

func (s *Server) validateUpdate(req *sandboxv1.UpdateSandboxRequest) error {
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
		err = s.validateChange(sb.GetSpec(), mask)
	}
	var f *fault.Error
	if errors.As(err, &f) { // named as the caller of an update sees it
		name := "sandbox." + f.Metadata()[fault.FieldKey]
		return fault.Field(name, "%s", strings.TrimPrefix(f.Message(), strings.TrimPrefix(name, "sandbox.")+": "))
	}
	return err
}

// maxRecovery is the longest recovery timeout, as of a create.
const maxRecovery = 24 * time.Hour

// validateChange checks the fields of a spec that a mask names, by the rules of a create.
func (s *Server) validateChange(spec *sandboxv1.SandboxSpec, mask []string) error {
	only := &sandboxv1.SandboxSpec{}
	for _, path := range mask {
		switch path {
		case "spec.expire_time":
			only.ExpireTime = spec.GetExpireTime()
		case "spec.reset_revision":
			only.ResetRevision = spec.GetResetRevision()
		case "spec.failure_policy":
			if _, ok := sandboxv1.FailurePolicy_name[int32(spec.GetFailurePolicy())]; !ok {
				return fault.Field("spec.failure_policy", "%d is no failure policy", spec.GetFailurePolicy())
			}
		case "spec.recovery_timeout":
			d := spec.GetRecoveryTimeout()
			if err := d.CheckValid(); d != nil && (err != nil || d.AsDuration() < 0 || d.AsDuration() > maxRecovery) {
				return fault.Field("spec.recovery_timeout", "must be between 0s and %s", maxRecovery)
			}
		}
	}
	if err := validateTimes(only); err != nil {
		return err
	}
	return s.validateExpiry(only)
}

// without drops our own keys: a caller that read a sandbox and writes its labels back sends them, too.
func without(labels map[string]string) map[string]string {
	out := map[string]string{}
	for k, v := range labels {
		if !strings.HasPrefix(k, v1alpha1.Group+"/") {
			out[k] = v
		}
	}
	return out
}

// invalid turns the API server's refusal of a custom resource into an error that names the field.
func invalid(err error, fallback string) error {
	var status apierrors.APIStatus
	if errors.As(err, &status) && status.Status().Details != nil && len(status.Status().Details.Causes) > 0 {
		cause := status.Status().Details.Causes[0]
		return fault.Field(cause.Field, "%s", cause.Message)
	}
	return fault.Field(fallback, "%v", err)
}
