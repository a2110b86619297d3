// Package layout has the paths in a slot: in the root that sandbox-init waits in. Agent, shim and sandbox-init agree on them.
package layout

import "path"

// The contents of a slot's root, which all slots of one version of sandbox-init share and none can write to.
const (
	// InitPath is sandbox-init.
	InitPath = "/sandbox-init"
	// HelperPath is sandbox-helper, which serves calls about files and ports.
	HelperPath = "/sandbox-helper"
	// PrivateDir is the slot's own directory, with its socket.
	PrivateDir = "/fsb"
	// FilesDir has the files that the claim mounts in /etc.
	FilesDir = "/fsb-etc"
	// NewRootDir is where the claim builds the new root.
	NewRootDir = "/new"
)

// The directories of a container of an OCI runtime that a supervisor can join. They are in /dev, which is in memory, so that an image gets no mount
// points. The container can write to none of them.
const (
	// ProgramsDir has the contents of a slot's root.
	ProgramsDir = "/dev/fsb/programs"
	// DoorDir is the container's own directory of the host where an agent waits for the supervisor that it has executed, at DoorSocket.
	DoorDir    = "/dev/fsb/door"
	DoorSocket = "agent.sock"
	// DoorVariable, if it is set in the environment of sandbox-init, is the path of that socket: init is to be a supervisor that joins.
	DoorVariable = "FSB_DOOR"
)

// Door returns the path of the socket in a container.
func Door() string { return path.Join(DoorDir, DoorSocket) }

// File returns where a slot keeps a file that the claim mounts at a destination.
func File(destination string) string { return path.Join(FilesDir, path.Base(destination)) }

// RootDirs returns the directories that every sandbox's root has, whatever its image contains: for the slot's own mounts.
func RootDirs() []string { return []string{"proc", "dev", "sys"} }

// RootFiles returns the files that every sandbox's /etc has: for the claim's mounts.
func RootFiles() []string { return []string{"hosts", "hostname", "resolv.conf"} }
