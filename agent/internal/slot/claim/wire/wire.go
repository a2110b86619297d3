// Package wire is the protocol between an agent and sandbox-init, pid 1 of a slot: the contents of a claim, its framing, and
// its failures. It does no I/O and has no state; its values may be read concurrently. It is linked into sandbox-init, of which
// a host runs one for each free slot, so it imports next to nothing.
//
// The messages over the slot's socket, each one frame:
//
//	init                          agent
//	hello{version}  ------------>
//	                <------------ claim, with the root's and the mounts' file descriptors
//	ready           ------------>                the root is built; nothing of the image has run
//	                <------------ go             the claim is durable
//	end of stream   ------------>                the command runs: the socket is closed on exec
//
// Instead of ready or the end of the stream, init may send failure{stage, errno, detail}, and then it exits. An agent that
// closes the connection before go ends the slot, and nothing has run.
//
// A frame is a type (1 byte), a length (4 bytes, little endian) and that much payload; a payload is a list of fields, each
// a tag (2 bytes), a length (4 bytes) and a value. A reader skips fields that it does not know, so that either side may be
// the older one, unless the tag marks them as critical: a reader that does not know such a field refuses the message.
package wire

import "syscall"

// Version is the version of the protocol that this code speaks. It grows with each field of which an agent has to know in
// advance whether a slot understands it.
const Version = 1

// Limits of what is accepted from the other side. The kernel's own limit of arguments and environment together is 6 MiB.
const (
	MaxMessage = 8 << 20
	MaxMounts  = 250 // the kernel passes at most 253 file descriptors at once
	maxGroups  = 1 << 16
	maxRlimits = 16
	maxPath    = 4096
	maxName    = 64
	maxProfile = 1024
	maxDetail  = 1024
	maxFilter  = 4096 * 8 // the kernel's BPF_MAXINSNS
)

// Claim is everything that turns a slot into a sandbox, except the mounts' file descriptors.
type Claim struct {
	// Args is the command line. The first is looked up in the PATH of Env as OCI runtimes do. KeepAlive is a sandbox without a process of its own,
	// and then Args are empty.
	Args      []string
	KeepAlive bool
	// Env is the whole environment.
	Env []string
	// Cwd is absolute. It is created if it is missing.
	Cwd string
	// UID, GID and Groups are numbers.
	UID, GID uint32
	Groups   []uint32
	// Hostname is the host name; empty for the slot's.
	Hostname string

	Capabilities Capabilities
	NoNewPrivs   bool
	Rlimits      []Rlimit
	// Seccomp is a BPF program for the kernel: an array of struct sock_filter. None if it is empty.
	Seccomp []byte
	// SeccompFlags are SECCOMP_FILTER_FLAG_* of seccomp(2).
	SeccompFlags uint32
	// AppArmorProfile applies from the exec on. None if it is empty.
	AppArmorProfile string
	// OOMScoreAdj is the oom_score_adj; nil for the slot's.
	OOMScoreAdj *int32
	// Umask is 022 if this is nil.
	Umask *uint32
	// Mounts are attached to the new root, in this order.
	Mounts []Mount
}

// Command returns what the sandbox executes; empty for none.
func (c *Claim) Command() string {
	if len(c.Args) == 0 {
		return ""
	}
	return c.Args[0]
}

// Capabilities are the five sets, as bit masks.
type Capabilities struct{ Bounding, Effective, Permitted, Inheritable, Ambient uint64 }

// Rlimit is one of RLIMIT_*. An unlimited one is all ones.
type Rlimit struct {
	Resource   uint32
	Soft, Hard uint64
}

// Attributes of a mount: the kernel's MOUNT_ATTR_*.
const (
	ReadOnly = 0x1
	NoSUID   = 0x2
	NoDev    = 0x4
	NoExec   = 0x8
)

// Mount attaches a mount in the new root.
type Mount struct {
	// Destination is absolute. Its missing parts are created. Symbolic links in it never lead out of the root.
	Destination string
	// Path names a file or directory within the slot, whose mount is copied privately; empty if FD is used.
	Path string
	// FD is the index of the detached mount among the claim's descriptors after the root's.
	FD uint32
	// Dir reports whether Destination is a directory, for creating it.
	Dir bool
	// Attributes are set on the mount, recursively, in addition to those that it has.
	Attributes uint64
}

// Stage is the part of a claim that failed.
type Stage uint8

// The stages, in the order in which sandbox-init passes through them. Numbers are never reused.
const (
	StageUnknown    Stage = iota
	StageClaim            // reading and understanding the claim
	StageRoot             // attaching the root and pivoting into it
	StageMount            // attaching a mount
	StageHostname         // setting the host name
	StageCwd              // making or entering the working directory
	StageStdio            // giving the standard streams to the user
	StageOOM              // setting oom_score_adj
	StageAppArmor         // setting the AppArmor profile
	StageRlimit           // setting a limit
	StageSeccomp          // loading the filter
	StageCapability       // setting capabilities
	StageUser             // setting the user or groups
	StageLookup           // finding the command
	StageExec             // executing it
	StageTerminal         // making the terminal
	StageProcess          // a call about a process
	StageLimit            // there are as many as there may be
)

var stages = [...]string{
	"", "reading the claim", "building the root", "mounting", "setting the host name", "entering the working directory",
	"giving the standard streams to the user", "setting the oom score", "setting the AppArmor profile", "setting limits",
	"loading the seccomp filter", "setting capabilities", "setting the user", "finding the command", "executing the command",
	"making the terminal", "the process", "a limit",
}

// String returns what the stage does, as a gerund.
func (s Stage) String() string {
	if int(s) < len(stages) && s != StageUnknown {
		return stages[s]
	}
	return "claiming the slot"
}

// Failure is why a claim failed. The slot has ended or is about to.
type Failure struct { //nolint:errname // the name of the message
	Stage Stage
	// Errno is 0 if no system call failed.
	Errno syscall.Errno
	// Detail names a path, a limit or a field.
	Detail string
}

// Details of a failure of a process that is not there: it has ended, or the supervisor that had started it has.
const (
	DetailEnded = "ended"
	DetailLost  = "lost"
)

// Error implements error.
func (f *Failure) Error() string {
	text := "sandbox-init: " + f.Stage.String()
	if f.Detail != "" {
		text += " " + f.Detail
	}
	if f.Errno != 0 {
		text += ": " + f.Errno.Error()
	}
	return text
}

// Unwrap returns the errno.
func (f *Failure) Unwrap() error {
	if f.Errno == 0 {
		return nil
	}
	return f.Errno
}
