package fastpath

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/image"
)

// Sizes that a custom resource can hold: a sandbox that was acknowledged must be writable.
const (
	// maxString is the length, in characters, of one argument or one variable's value.
	maxString = 131072
	// maxResourceBytes is the length of the whole as JSON; etcd takes 1.5 MiB, of which status and managed fields need some.
	maxResourceBytes = 1 << 20
	// jsonGrowth is by how much JSON may grow what protobuf holds: one byte becomes `\u00XX`.
	jsonGrowth = 6
)

// plan is a create call that was found good.
type plan struct {
	request *sandboxv1.CreateSandboxRequest
	image   string // normalized
	mode    sandboxv1.ConsistencyMode
	digest  string
}

// validate checks everything that needs no I/O, beyond what protovalidate has checked.
func (s *Server) validate(req *sandboxv1.CreateSandboxRequest) (*plan, error) {
	spec := req.GetSpec()
	imageKey, err := image.Normalize(spec.GetImage())
	if err != nil {
		return nil, fault.Field("spec.image", "%v", err)
	}
	if err := validateLabels(req.GetLabels()); err != nil {
		return nil, err
	}
	if err := validateTimes(spec); err != nil {
		return nil, err
	}
	if err := validateProcess(spec); err != nil {
		return nil, err
	}
	if proto.Size(req) > maxResourceBytes/jsonGrowth {
		raw, err := json.Marshal(convert.SpecFromProto(spec))
		if err != nil || len(raw) > maxResourceBytes {
			return nil, fault.New(errdefs.ErrInvalidArgument, fault.RequestTooLarge,
				"spec: %d bytes as JSON, at most %d can be kept", len(raw), maxResourceBytes).With(fault.FieldKey, "spec")
		}
	}
	mode := spec.GetConsistencyMode()
	if mode == sandboxv1.ConsistencyMode_CONSISTENCY_MODE_UNSPECIFIED {
		mode = s.config.Mode
	}
	return &plan{request: req, image: imageKey, mode: mode, digest: digestOf(req.GetLabels(), spec)}, nil
}

// findPool returns a pool, from memory if it is there. The API server is asked before one is said not to exist: informers
// may be behind, by seconds after it was away.
func (s *Server) findPool(ctx context.Context, namespace, name string) (*v1alpha1.SandboxPool, error) {
	if pool, ok := s.config.Pools.Pool(namespace, name); ok {
		return pool, nil
	}
	if !s.config.Pools.Synced() {
		return nil, errAPI(nil)
	}
	ctx, cancel := context.WithTimeout(ctx, s.patience())
	defer cancel()
	pool := &v1alpha1.SandboxPool{}
	err := s.config.Resources.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, pool)
	switch {
	case err == nil:
		return pool, nil
	case apierrors.IsNotFound(err):
		return nil, fault.New(errdefs.ErrNotFound, fault.PoolNotFound, "pool %s/%s does not exist", namespace, name).With("pool", name)
	}
	return nil, errAPI(err)
}

// validateLabels checks a sandbox's labels; our own keys are not the caller's to set.
func validateLabels(labels map[string]string) error {
	if errs := metav1validation.ValidateLabels(labels, field.NewPath("labels")); len(errs) > 0 {
		slices.SortFunc(errs, func(a, b *field.Error) int { return strings.Compare(a.Error(), b.Error()) })
		return fault.Field("labels", "%s", errs[0].ErrorBody())
	}
	for key := range labels {
		if strings.HasPrefix(key, v1alpha1.Group+"/") {
			return fault.Field("labels", "%q: keys of %s are set by the server", key, v1alpha1.Group)
		}
	}
	return nil
}

// validateExpiry refuses a sandbox that would expire at once.
func (s *Server) validateExpiry(spec *sandboxv1.SandboxSpec) error {
	if t := spec.GetExpireTime(); t != nil && !t.AsTime().After(s.config.Clock.Now()) {
		return fault.Field("spec.expire_time", "%s is in the past", t.AsTime().Format("2006-01-02T15:04:05Z07:00"))
	}
	return nil
}

func validateTimes(spec *sandboxv1.SandboxSpec) error {
	if t := spec.GetExpireTime(); t != nil {
		if err := t.CheckValid(); err != nil {
			return fault.Field("spec.expire_time", "%v", err)
		}
	}
	if t := spec.GetResetRevision(); t != nil {
		if err := t.CheckValid(); err != nil {
			return fault.Field("spec.reset_revision", "%v", err)
		}
	}
	return nil
}

// validateProcess checks what the kernel or the custom resource could not hold.
func validateProcess(spec *sandboxv1.SandboxSpec) error {
	check := func(name, value string) error {
		if strings.ContainsRune(value, 0) {
			return fault.Field(name, "contains a NUL byte")
		}
		if n := utf8.RuneCountInString(value); n > maxString {
			return fault.Field(name, "%d characters, at most %d are taken", n, maxString)
		}
		return nil
	}
	for _, list := range []struct {
		name   string
		values []string
	}{{"spec.command", spec.GetCommand()}, {"spec.args", spec.GetArgs()}, {"spec.working_dir", []string{spec.GetWorkingDir()}}} {
		for _, v := range list.values {
			if err := check(list.name, v); err != nil {
				return err
			}
		}
	}
	for key, v := range spec.GetEnv() {
		if key == "" || strings.ContainsAny(key, "=\x00\n") {
			return fault.Field("spec.env", "%q is no name of a variable", key)
		}
		if err := check("spec.env", v); err != nil {
			return err
		}
	}
	return nil
}
