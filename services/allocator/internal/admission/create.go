// Package admission checks what callers ask for: the rules of a create and of an update that need no I/O, beyond those that
// protovalidate has checked. It keeps nothing, and may be called concurrently.
package admission

import (
	"encoding/json"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

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

// Plan is a create call that was admitted.
type Plan struct {
	Request *sandboxv1.CreateSandboxRequest
	// Image is the normalized reference of the image.
	Image string
	// Mode is the request's, or the default.
	Mode sandboxv1.ConsistencyMode
}

// Create checks a create call. defaultMode is that of calls that name none.
func Create(req *sandboxv1.CreateSandboxRequest, defaultMode sandboxv1.ConsistencyMode) (*Plan, error) {
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
		mode = defaultMode
	}
	return &Plan{Request: req, Image: imageKey, Mode: mode}, nil
}

// validateLabels checks a sandbox's labels; the caller may not set keys of this project's group.
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

// Expiry refuses a sandbox that would expire at once. It is no part of Create: a repetition is answered with its sandbox even
// when that has expired.
func Expiry(spec *sandboxv1.SandboxSpec, now time.Time) error {
	if t := spec.GetExpireTime(); t != nil && !t.AsTime().After(now) {
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
	if spec.GetKeepAlive() && len(spec.GetCommand())+len(spec.GetArgs()) > 0 {
		return fault.Field("spec.keep_alive", "a sandbox that is kept alive has no process of its own: command and args must be empty")
	}
	check := func(name, value string) error {
		if strings.ContainsRune(value, 0) {
			return fault.Field(name, "contains a NUL byte")
		}
		if n := utf8.RuneCountInString(value); n > maxString {
			return fault.Field(name, "%d characters, at most %d are allowed", n, maxString)
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
			return fault.Field("spec.env", "invalid name of a variable: %q", key)
		}
		if err := check("spec.env", v); err != nil {
			return err
		}
	}
	return nil
}
