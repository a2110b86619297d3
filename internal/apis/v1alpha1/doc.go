// Package v1alpha1 defines the custom resources of the API group fast-sandbox.io, their conditions, and every label and
// annotation key that the project writes. It does no I/O; its functions and methods that do not modify their receiver may
// be called concurrently.
//
// +kubebuilder:object:generate=true
// +groupName=fast-sandbox.io
package v1alpha1
