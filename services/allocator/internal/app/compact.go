package app

import (
	"unique"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// compact reduces a custom resource before the informer keeps it: there may be 100,000. It drops what the allocator does not read,
// and shares strings that many resources have in common.
func compact(obj any) (any, error) {
	sb, ok := obj.(*v1alpha1.Sandbox)
	if !ok { // the informer's cache.DeletedFinalStateUnknown
		return obj, nil
	}
	share(&sb.APIVersion, &sb.Kind)
	sb.ManagedFields = nil
	delete(sb.Annotations, corev1.LastAppliedConfigAnnotation)
	share(&sb.Namespace)
	shareAll(sb.Finalizers)
	sb.Labels, sb.Annotations = sharedKeys(sb.Labels), sharedKeys(sb.Annotations)
	for i := range sb.OwnerReferences {
		o := &sb.OwnerReferences[i]
		share(&o.APIVersion, &o.Kind, &o.Name)
		o.UID = types.UID(shared(string(o.UID)))
	}

	spec := &sb.Spec
	share(&spec.Image, &spec.PoolRef, &spec.WorkingDir)
	share(&spec.ConsistencyMode)
	share(&spec.FailurePolicy)
	share(&spec.Network)
	shareAll(spec.Command)
	shareAll(spec.Args)
	for i := range spec.Envs {
		share(&spec.Envs[i].Name)
	}

	st := &sb.Status
	share(&st.AssignedPod, &st.NodeName, &st.Reason, &st.Message)
	share(&st.Phase)
	share(&st.StartPath)
	for i := range st.Conditions {
		c := &st.Conditions[i]
		share(&c.Type, &c.Reason, &c.Message)
		share(&c.Status)
	}
	return sb, nil
}

// shared returns a string that shares its memory with equal ones.
func shared[T ~string](text T) T {
	if text == "" {
		return ""
	}
	return T(unique.Make(string(text)).Value())
}

func share[T ~string](texts ...*T) {
	for _, t := range texts {
		*t = shared(*t)
	}
}

func shareAll(texts []string) {
	for i := range texts {
		texts[i] = shared(texts[i])
	}
}

// sharedKeys returns a map of minimal size with shared keys. Most values belong to one sandbox.
func sharedKeys(m map[string]string) map[string]string {
	if len(m) == 0 {
		return nil
	}
	out := make(map[string]string, len(m))
	for k, v := range m {
		out[shared(k)] = v
	}
	return out
}
