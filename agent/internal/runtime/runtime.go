// Package runtime is what the agent asks of a container runtime, and the words that it is asked in. It does nothing
// itself: runtime/ctrd drives containerd, runtime/fake keeps containers in memory for tests, and both pass the one suite
// in runtime/conformance.
package runtime

import (
	"context"
	"syscall"
	"time"

	"google.golang.org/protobuf/types/known/anypb"
)

// Runtime keeps images and containers. Every method may be called concurrently, for one container as well; the order
// among calls for one container is the caller's business.
//
// Errors are faults (internal/fault) where the cause is known: the request's (NotFound/ImageNotFound,
// InvalidArgument/InvalidField, FailedPrecondition/ImageInvalid, CommandNotFound, CommandNotExecutable, UserNotFound,
// WorkingDirInvalid), the registry's (Unavailable/ImagePullFailed) or the runtime's own (Unavailable/RuntimeUnavailable:
// it cannot be reached now; the same call may work later). An end of ctx is ctx's error. All others are unclassified.
type Runtime interface {
	// Ping returns nil if the runtime answers and can run containers; else why not. Blocks until ctx ends at the most.
	Ping(ctx context.Context) error

	// Images returns the normalised references of the images that are there, in order.
	Images(ctx context.Context) ([]string, error)
	// WatchImages calls changed soon after any image came, changed or went. It blocks until ctx ends (nil) or the
	// runtime is lost (Unavailable), and then it may be called again; changes in between are for the caller to find.
	WatchImages(ctx context.Context, changed func()) error
	// Pull brings an image to the node, unpacked, and returns its normalised reference. An image that is there is asked
	// for again at its registry. Concurrent pulls of one image share one download, which goes on while any caller waits.
	// progress (may be nil) is called from another goroutine until Pull returns, never after. Safe to retry.
	Pull(ctx context.Context, ref string, progress func(Progress)) (string, error)

	// PinImages protects images from the kubelet's image garbage collection: those that containers use, and those listed,
	// by their normalized names, for this agent. It unprotects those that it has protected and that neither holds for any
	// longer. An image that is not on the node is skipped. A listed image stays protected for some minutes after the last call:
	// call it twice a minute. Safe to repeat.
	PinImages(ctx context.Context, listed []string) error

	// Create makes a container with its task, not started: the image (pulled if missing), the snapshot, the durable
	// record and the task. reached is called from this goroutine after each stage. After an error some of it may be
	// left: the caller calls Delete. A container of this id that exists is AlreadyExists, and is left alone.
	Create(ctx context.Context, c Container, reached func(Stage)) error
	// Start starts the created task's process. It returns once the process runs, or with why it cannot.
	Start(ctx context.Context, id string) error
	// Wait blocks until the task's process has ended and returns how. What has ended already returns at once. NotFound:
	// there is no such task. Safe to call any number of times.
	Wait(ctx context.Context, id string) (Exit, error)
	// Signal sends a signal to the task's first process, or to all of them. A process that has ended is no error;
	// NotFound: there is no such task.
	Signal(ctx context.Context, id string, sig syscall.Signal, all bool) error
	// HandlesSignal tells whether the task's first process catches or blocks a signal. One that does neither never notices it: the
	// kernel keeps from the first process of a PID namespace whatever would end it by default. In doubt it is true.
	HandlesSignal(ctx context.Context, id string, sig syscall.Signal) bool
	// Finish keeps report with the container of an ended process, durably, and then removes the task, after which all
	// of the process's output is in its log. Safe to repeat.
	Finish(ctx context.Context, id string, report *anypb.Any) error
	// SetLabel sets one label of the container, durably. NotFound: there is no such container. Safe to repeat.
	SetLabel(ctx context.Context, id, key, value string) error
	// Delete removes the container and all that belongs to it, killing what runs: task, cgroup, log directory, snapshot,
	// record. What is not there is deleted already. After an error it may be called again.
	Delete(ctx context.Context, id string) error
	// List returns the containers that carry all of the labels, in the order of their ids.
	List(ctx context.Context, labels map[string]string) ([]Found, error)
}

// Stage is a step of Create, in the order in which they are reached.
type Stage int

// The stages of a create.
const (
	// StageImage: the image is there, unpacked.
	StageImage Stage = iota + 1
	// StageSnapshot: the root file system is there.
	StageSnapshot
	// StageContainer: the durable record is there.
	StageContainer
	// StageTask: the task is there; its process is not started.
	StageTask
	// StageClaim stands in the place of StageTask where a slot is claimed: the root file system is in it.
	StageClaim
)

// Network is how a container is connected.
type Network int

// The networks.
const (
	// NetworkAgent joins the agent Pod's network namespace.
	NetworkAgent Network = iota
	// NetworkNone is a namespace of its own with nothing but loopback, which is up.
	NetworkNone
)

// Limits are a container's own limits; zero is none.
type Limits struct {
	// CPUMillis is CPU time in thousandths of a core, MemoryBytes memory (swap included), PIDs processes and threads.
	CPUMillis, MemoryBytes, PIDs int64
}

// Container is what to run.
type Container struct {
	// ID is unique on the node for all time.
	ID string
	// Labels of the container.
	Labels map[string]string
	// Record is kept with the container.
	Record *anypb.Any
	// Image is a reference in any form.
	Image string
	// Command and Args: an empty Command is the image's own, and then empty Args are too.
	Command, Args []string
	// Env is laid over the image's own.
	Env map[string]string
	// WorkingDir; empty for the image's own.
	WorkingDir string
	// Hostname of the container.
	Hostname string
	// Limits in force.
	Limits Limits
	// Network of the container.
	Network Network
	// LogPath is the file that stdout and stderr are appended to; it exists, and its directory goes with Delete.
	LogPath string
	// HostnamePath is a file with the host name, for /etc/hostname; empty for none.
	HostnamePath string
}

// Exit is how a process ended.
type Exit struct {
	// Code is the exit code, 128 + n for signal n.
	Code int32
	// At is when it ended.
	At time.Time
	// OOMKilled tells that the kernel killed for want of memory within the container's limit.
	OOMKilled bool
}

// TaskState is what List sees of a container's task.
type TaskState int

// The states of a task.
const (
	// TaskNone: there is none.
	TaskNone TaskState = iota
	// TaskCreated: it was never started.
	TaskCreated
	// TaskRunning: its process runs (paused included).
	TaskRunning
	// TaskStopped: its process has ended.
	TaskStopped
)

// Found is a container that List found.
type Found struct {
	// ID and Labels of the container.
	ID     string
	Labels map[string]string
	// Record is what Create was given, Report what Finish was given; nil if missing.
	Record, Report *anypb.Any
	// CreatedAt is when the record was written.
	CreatedAt time.Time
	// Task is the state of its task.
	Task TaskState
	// Claiming tells that a claim made the container and never came to its end: nobody was told of it, whatever runs in it.
	Claiming bool
}

// Progress is how far a pull has come.
type Progress struct {
	// Downloaded and Total are in bytes; Total grows while manifests are read.
	Downloaded, Total int64
	// Phase is `resolving`, `downloading`, `unpacking` or `done`.
	Phase string
}

// The phases of a pull.
const (
	PhaseResolving   = "resolving"
	PhaseDownloading = "downloading"
	PhaseUnpacking   = "unpacking"
	PhaseDone        = "done"
)
