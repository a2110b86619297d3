package graph

import "slices"

// The collector's own finalizers.
const (
	FinalizerOrphan     = "orphan"
	FinalizerForeground = "foregroundDeletion"
)

// Kind is a kind of object. All versions of a kind are one Kind: they are views of the same objects.
type Kind struct{ Group, Kind string }

// String returns Kind.group, as kubectl prints it.
func (k Kind) String() string {
	if k.Group == "" {
		return k.Kind
	}
	return k.Kind + "." + k.Group
}

// Scope says whether objects of a kind are namespaced.
type Scope uint8

// The scopes. ScopeUnknown is that of an unknown kind.
const (
	ScopeUnknown Scope = iota
	ScopeNamespaced
	ScopeCluster
)

// Flag is an optional boolean, as owner references have them.
type Flag uint8

// The values. Unset means that the field was absent.
const (
	Unset Flag = iota
	False
	True
)

// Owner is an owner reference.
type Owner struct {
	Kind    Kind
	Version string
	Name    string
	UID     string
	// Block is blockOwnerDeletion, Controller is controller.
	Block, Controller Flag
}

// Object is the metadata of an object that the collector uses.
type Object struct {
	Kind            Kind
	Namespace, Name string
	UID             string
	ResourceVersion string
	Owners          []Owner
	Finalizers      []string
	// Deleting reports whether it has a deletion timestamp.
	Deleting bool
}

func (o Object) awaitsOrphaning() bool {
	return o.Deleting && slices.Contains(o.Finalizers, FinalizerOrphan)
}

// awaitsDependents reports whether the object is being deleted in the foreground: it waits for the dependents that block it.
func (o Object) awaitsDependents() bool {
	return o.Deleting && slices.Contains(o.Finalizers, FinalizerForeground) && !o.awaitsOrphaning()
}

// policy returns the propagation policy with which the object must be deleted so that its finalizers are respected.
func (o Object) policy() Policy {
	switch {
	case slices.Contains(o.Finalizers, FinalizerOrphan):
		return Orphan
	case slices.Contains(o.Finalizers, FinalizerForeground):
		return Foreground
	default:
		return Background
	}
}

// Ref is what an owner reference points at: kind, namespace, name, and the expected UID. Namespace is the dependent's, or empty
// for cluster-scoped kinds.
type Ref struct {
	Kind            Kind
	Version         string
	Namespace, Name string
	UID             string
}

func (r Ref) malformed() bool {
	return r.Kind.Kind == "" || r.Version == "" || r.Name == "" || r.UID == ""
}

// names reports whether r points at an object, regardless of the version.
func (r Ref) names(o *Object) bool {
	return r.UID == o.UID && r.Kind == o.Kind && r.Namespace == o.Namespace && r.Name == o.Name
}

// Policy is a propagation policy.
type Policy string

// The policies, as the API server spells them.
const (
	Background Policy = "Background"
	Foreground Policy = "Foreground"
	Orphan     Policy = "Orphan"
)
