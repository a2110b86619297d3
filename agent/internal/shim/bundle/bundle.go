// Package bundle names the files that a shim of ours keeps in the bundle of a container, which is the working directory of what containerd executes
// for it. It imports nothing: the program that reads them is executed once for each container.
package bundle

// Deleted has the answer of a shim that has deleted the container (DeleteResponse of the Task API): nothing of it is left.
const Deleted = "deleted"
