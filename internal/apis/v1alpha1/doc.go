// Package v1alpha1 holds the custom resources of the API group fast-sandbox.io, their conditions, and every label and
// annotation key that the project writes. It is data only: nothing here does I/O.
//
// Fields follow seed 002 (lifecycle) and seed 001 (architecture) as DESIGN section 1 reconciles them.
//
// +kubebuilder:object:generate=true
// +groupName=fast-sandbox.io
package v1alpha1
