package graph

import "slices"

// The finalizers that are the collector's own.
const (
	FinalizerOrphan     = "orphan"
	FinalizerForeground = "foregroundDeletion"
)

// Kind is a kind of object. All versions of a group's kind are one kind: they are views of the same objects.
type Kind struct{ Group, Kind string }

// String is Kind.group, as kubectl has it.
func (k Kind) String() string {
	if k.Group == "" {
		return k.Kind
	}
	return k.Kind + "." + k.Group
}

// Scope tells whether objects of a kind live in namespaces.
type Scope uint8

// The zero Scope is that of a kind of which nothing is known.
const (
	ScopeUnknown Scope = iota
	ScopeNamespaced
	ScopeCluster
)

// Flag is an optional boolean, as owner references have them.
type Flag uint8

// The zero Flag was not given.
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

// Object is the metadata of an object that counts.
type Object struct {
	Kind            Kind
	Namespace, Name string
	UID             string
	ResourceVersion string
	Owners          []Owner
	Finalizers      []string
	// Deleting tells that it has a deletion timestamp.
	Deleting bool
}

func (o Object) awaitsOrphaning() bool {
	return o.Deleting && slices.Contains(o.Finalizers, FinalizerOrphan)
}

// awaitsDependents tells of a foreground deletion: the object stays until the dependents that block it are gone.
func (o Object) awaitsDependents() bool {
	return o.Deleting && slices.Contains(o.Finalizers, FinalizerForeground) && !o.awaitsOrphaning()
}

// policy is how an object has to be deleted so that a wish that it carries as a finalizer is heeded.
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

// Ref is what an owner reference points at: a place, and the UID that is expected there. Namespace is the dependent's, or
// empty if the kind has no namespaces.
type Ref struct {
	Kind            Kind
	Version         string
	Namespace, Name string
	UID             string
}

func (r Ref) malformed() bool {
	return r.Kind.Kind == "" || r.Version == "" || r.Name == "" || r.UID == ""
}

// names tells whether an object is where r points. The version does not matter.
func (r Ref) names(o *Object) bool {
	return r.UID == o.UID && r.Kind == o.Kind && r.Namespace == o.Namespace && r.Name == o.Name
}

// Policy is a propagation policy.
type Policy string

// The policies, as the API spells them.
const (
	Background Policy = "Background"
	Foreground Policy = "Foreground"
	Orphan     Policy = "Orphan"
)
