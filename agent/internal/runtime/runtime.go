// Package runtime defines what the agent needs of a container runtime. It has no implementation: runtime/ctrd drives
// containerd, runtime/fake keeps containers in memory for tests, and both pass the conformance suite in
// runtime/conformance.
package runtime

import (
	"context"
	"syscall"
	"time"

	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/internal/resources"
)

// Runtime keeps images and containers. Every method may be called concurrently, also for one container; the caller puts the
// calls for one container in order.
//
// Errors are faults (internal/fault) where the cause is known: the request's (NotFound/ImageNotFound,
// InvalidArgument/InvalidField, FailedPrecondition/ImageInvalid, CommandNotFound, CommandNotExecutable, UserNotFound,
// WorkingDirInvalid), the registry's (Unavailable/ImagePullFailed) or the runtime's own (Unavailable/RuntimeUnavailable:
// it cannot be reached now; the same call may succeed later). The end of ctx is ctx's error. All others are unclassified.
type Runtime interface {
	// Ping returns nil if the runtime answers and can run containers, otherwise why not. It blocks at most until ctx ends.
	// FailedPrecondition: it answers, and serves the containers that it has, but the node lacks what a new one needs.
	Ping(ctx context.Context) error

	// Images returns the normalized references of the images on the node, sorted.
	Images(ctx context.Context) ([]string, error)
	// WatchImages calls changed soon after any image was added, changed or removed. It blocks until ctx ends (nil) or the
	// runtime is lost (Unavailable). It may then be called again; the caller has to find changes in between by itself.
	WatchImages(ctx context.Context, changed func()) error
	// Pull downloads and unpacks an image and returns its normalized reference. The registry is asked even if the image is on
	// the node. Concurrent pulls of one image share one download, which continues while any caller waits. progress (may be nil)
	// is called from another goroutine until Pull returns, never after. Safe to retry.
	Pull(ctx context.Context, ref string, progress func(Progress)) (string, error)

	// PinImages protects images from the kubelet's image garbage collection: those that containers use, and those listed,
	// by their normalized names, for this agent. It unprotects those that it has protected and that neither holds for any
	// longer. An image that is not on the node is skipped. A listed image stays protected for some minutes after the last call:
	// call it twice a minute. Safe to repeat.
	PinImages(ctx context.Context, listed []string) error

	// Create creates a container with its task, not started: the image (pulled if missing), the snapshot, the durable
	// record and the task. reached is called from this goroutine after each stage. After an error some of it may be
	// left, and the caller calls Delete. If a container of this id exists, it is left alone and the error is AlreadyExists.
	Create(ctx context.Context, c Container, reached func(Stage)) error
	// Start starts the created task's process and returns once it runs.
	Start(ctx context.Context, id string) error
	// Wait blocks until the task's process has ended and returns its exit. NotFound: there is no such task. Safe to call any
	// number of times.
	Wait(ctx context.Context, id string) (Exit, error)
	// Signal sends a signal to the task's first process, or to all of them. A process that has ended is no error;
	// NotFound: there is no such task.
	Signal(ctx context.Context, id string, sig syscall.Signal, all bool) error
	// HandlesSignal reports whether a signal has an effect on the task's process: it catches the signal, or the signal ends it. A process that is the
	// first of its PID namespace and does not catch it ignores it: the kernel does not deliver a signal to such a process if the default action would
	// end it. In doubt it returns true.
	HandlesSignal(ctx context.Context, id string, sig syscall.Signal) bool
	// DiskUsage returns what the container's writable layer takes. It reads the whole layer, or as much of it as exceeds a field of
	// limit that is not zero. NotFound: there is no such container. tree.ErrTooDeep: the layer cannot be measured.
	DiskUsage(ctx context.Context, id string, limit DiskUsage) (DiskUsage, error)
	// Finish stores report with the container of an ended process, durably, and then removes the task, after which all
	// of the process's output is in its log. Safe to repeat.
	Finish(ctx context.Context, id string, report *anypb.Any) error
	// SetLabel sets one label of the container, durably. NotFound: there is no such container. Safe to repeat.
	SetLabel(ctx context.Context, id, key, value string) error
	// Delete removes the container and all that belongs to it, killing what runs: task, cgroup, log directory, snapshot,
	// record. A container that does not exist is deleted already. After an error it may be called again.
	Delete(ctx context.Context, id string) error
	// List returns the containers that carry all of the labels, sorted by id.
	List(ctx context.Context, labels map[string]string) ([]Found, error)
}

// Stage is a step of Create, in the order in which they are reached.
type Stage int

// The stages of a create.
const (
	// StageImage: the image is on the node, unpacked.
	StageImage Stage = iota + 1
	// StageSnapshot: the root file system exists.
	StageSnapshot
	// StageContainer: the durable record exists.
	StageContainer
	// StageTask: the task exists; its process is not started.
	StageTask
	// StageClaim replaces StageTask if a slot is claimed: the slot has its root file system.
	StageClaim
)

// Network is how a container is connected.
type Network int

// The networks.
const (
	// NetworkAgent joins the agent Pod's network namespace.
	NetworkAgent Network = iota
	// NetworkNone is a network namespace of its own with only a loopback interface, which is up.
	NetworkNone
)

// Container is what to run.
type Container struct {
	// ID is unique on the node and never used again.
	ID string
	// Labels of the container.
	Labels map[string]string
	// Record is stored with the container.
	Record *anypb.Any
	// Image is a reference in any form.
	Image string
	// Command and Args: an empty Command is the image's own, and then empty Args are too.
	Command, Args []string
	// KeepAlive: the container has no process of its own, Command and Args are empty, and the image's have no effect. It runs until it is deleted or
	// killed. A runtime that cannot do so refuses it with InvalidArgument for spec.keep_alive.
	KeepAlive bool
	// Env overrides the image's own.
	Env map[string]string
	// WorkingDir; empty for the image's own.
	WorkingDir string
	// Hostname of the container.
	Hostname string
	// Limits in force; zero is none.
	Limits resources.Limits
	// Network of the container.
	Network Network
	// LogPath is the file that stdout and stderr are appended to. It exists; Delete removes its directory.
	LogPath string
	// HostnamePath is a file with the host name, for /etc/hostname; empty for none.
	HostnamePath string
}

// DiskUsage is disk space in bytes, and a number of files, each counted once for each of its names.
type DiskUsage struct{ Bytes, Inodes int64 }

// Exit is how a process ended.
type Exit struct {
	// Code is the exit code, 128 + n for signal n.
	Code int32
	// At is when it ended.
	At time.Time
	// OOMKilled reports whether the kernel killed a process because the container reached its memory limit.
	OOMKilled bool
	// RuntimeLost reports whether it ended because what ran it has ended, such as a shim that was killed.
	RuntimeLost bool
}

// TaskState is the state of a container's task, as List reports it.
type TaskState int

// The states of a task.
const (
	// TaskNone: there is none.
	TaskNone TaskState = iota
	// TaskCreated: it was never started. A task whose start is prepared may be TaskRunning already, and is Claiming then.
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
	// Record is the one given to Create, Report the one given to Finish; nil if missing.
	Record, Report *anypb.Any
	// CreatedAt is when the record was written.
	CreatedAt time.Time
	// Task is the state of its task.
	Task TaskState
	// Claiming reports whether a claim made the container and is not complete: the sandbox was never acknowledged, whatever
	// runs in it.
	Claiming bool
}

// Progress is the progress of a pull.
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
