// Package launch owns the way from a sandbox's record to a running process, and back to nothing: it claims a slot or, on
// the cold path, creates a container of its own, and it removes what either left. It keeps no state: what exists is in the
// runtime and in the logs, and the order of calls on one sandbox is its caller's business. All methods of Launcher may be
// called concurrently, for different containers.
package launch

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"google.golang.org/protobuf/types/known/anypb"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
)

// Slots hands out containers that were started ahead of time. slot.Pool implements it. Its methods return at once.
type Slots interface {
	// Take hands out a slot, the best one for the image; ok is false if there is none.
	Take(image string) (id string, ok bool)
	// Drop has slots removed that were taken and are of no use, or that an earlier agent process left.
	Drop(ids ...string)
}

// Claimer is the part of runtime.Slots that a claim needs.
type Claimer interface {
	// Claim turns a slot into a container, as runtime.Slots says.
	Claim(ctx context.Context, c runtime.Container, reached func(runtime.Stage)) error
	// SlotClaimed completes a claim, as runtime.Slots says.
	SlotClaimed(id string) error
}

// Config is what a Launcher needs.
type Config struct {
	// Runtime runs the containers.
	Runtime runtime.Runtime
	// Logs keeps their output.
	Logs *logs.Store
	// Slots has the slots that Claimer claims. Both are nil if there are none: every launch then takes the cold path.
	Slots   Slots
	Claimer Claimer
	// Pool is the pool that the agent belongs to, for the containers' labels.
	Pool string
	// MaxLimits are the pool's maxima, to which defaults are lowered; zero is none.
	MaxLimits resources.Limits
	// Process identifies this process of the agent, for the same labels.
	Process string
	// Clock; nil is the real one.
	Clock clock.PassiveClock
}

// Launcher starts and removes the containers of one agent. Make it with New.
type Launcher struct{ config Config }

// New returns a Launcher. It does no I/O.
func New(cfg Config) *Launcher {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	return &Launcher{config: cfg}
}

// Result is how far a launch came. After an error it names what Undo has to remove.
type Result struct {
	// ID is the container's.
	ID string
	// Path is how it was started.
	Path sandboxv1.StartPath
	// StartTime is just before the process was started.
	StartTime time.Time

	// left is what Undo has to remove.
	left leftover
}

// leftover is what a launch may leave behind when it fails.
type leftover int

const (
	leftNothing leftover = iota
	// leftLog is the log directory alone: the container of this id is another agent's.
	leftLog
	// leftContainer is everything under the id.
	leftContainer
)

// Launch starts a sandbox: it claims a slot, or creates a container if there is none for it. reached is called from this
// goroutine after each stage. The errors are those of runtime.Runtime, and runtime.Shortage; AlreadyExists is a container of another agent.
func (l *Launcher) Launch(ctx context.Context, record *agentv1.SandboxRecord, persisted bool, reached func(runtime.Stage)) (Result, error) {
	result, claimed, err := l.claim(ctx, record, persisted, reached)
	if !claimed {
		result, err = l.create(ctx, record, persisted, reached)
	}
	return result, runtime.Shortage(err)
}

// claim makes a slot the sandbox's container. claimed is false if there is no slot for it, or if the slot was lost before
// anything of the sandbox ran in it, which costs the launch some time and nothing else.
func (l *Launcher) claim(ctx context.Context, record *agentv1.SandboxRecord, persisted bool, reached func(runtime.Stage)) (result Result, claimed bool, err error) {
	// A slot is in the agent's network.
	if l.config.Slots == nil || Network(record) != runtime.NetworkAgent {
		return Result{}, false, nil
	}
	image, err := runtime.NormalizeImage(record.GetSpec().GetImage())
	if err != nil {
		return Result{}, true, err
	}
	id, ok := l.config.Slots.Take(image)
	if !ok {
		return Result{}, false, nil
	}
	result = Result{ID: id, Path: sandboxv1.StartPath_START_PATH_SLOT, left: leftContainer}
	paths, err := l.config.Logs.Paths(id)
	if err != nil {
		return result, true, err
	}
	c, err := l.container(id, record, persisted, paths)
	if err != nil {
		return result, true, err
	}
	result.StartTime = l.config.Clock.Now()
	err = l.config.Claimer.Claim(ctx, c, reached)
	if errors.Is(err, runtime.ErrSlotLost) && ctx.Err() == nil {
		logr.FromContextOrDiscard(ctx).Info("slot lost; taking the cold path", obs.KeyContainer, id, obs.KeyError, err.Error())
		l.config.Slots.Drop(id)
		return Result{}, false, nil
	}
	if err == nil {
		err = l.config.Logs.MarkStarted(id, result.StartTime)
	}
	if err == nil {
		err = l.config.Claimer.SlotClaimed(id)
	}
	return result, true, err
}

// create takes the cold path.
func (l *Launcher) create(ctx context.Context, record *agentv1.SandboxRecord, persisted bool, reached func(runtime.Stage)) (Result, error) {
	result := Result{ID: identity.FenceOf(record.GetFence()).ContainerID(), Path: sandboxv1.StartPath_START_PATH_COLD}
	paths, err := l.config.Logs.Create(result.ID, record.GetName())
	if err != nil {
		return result, foreign(err, result.ID)
	}
	result.left = leftContainer
	c, err := l.container(result.ID, record, persisted, paths)
	if err != nil {
		return result, err
	}
	if err := l.config.Runtime.Create(ctx, c, reached); err != nil {
		if errdefs.IsAlreadyExists(err) {
			result.left = leftLog
		}
		return result, foreign(err, result.ID)
	}
	if err := ctx.Err(); err != nil {
		return result, err
	}
	result.StartTime = l.config.Clock.Now()
	if err := l.config.Runtime.Start(ctx, result.ID); err != nil {
		return result, err
	}
	return result, l.config.Logs.MarkStarted(result.ID, result.StartTime)
}

// foreign explains an AlreadyExists; other errors are returned as they are.
func foreign(err error, id string) error {
	if !errdefs.IsAlreadyExists(err) {
		return err
	}
	return fault.Wrap(err, errdefs.ErrAlreadyExists, fault.SandboxExists, "container %s exists on the node and belongs to another agent", id)
}

// Undo removes what a launch that failed left. Safe to repeat.
func (l *Launcher) Undo(ctx context.Context, result Result) error {
	switch result.left {
	case leftLog:
		return l.config.Logs.Remove(result.ID)
	case leftContainer:
		return l.Remove(ctx, result.ID)
	case leftNothing:
	}
	return nil
}

// Remove removes a container and its log, killing what runs. What does not exist is removed already. Safe to repeat.
func (l *Launcher) Remove(ctx context.Context, id string) error {
	l.config.Logs.Release(id) // the runtime removes the directory
	if err := l.config.Runtime.Delete(ctx, id); err != nil {
		return err
	}
	return l.config.Logs.Remove(id)
}

// container translates a record for the runtime.
func (l *Launcher) container(id string, r *agentv1.SandboxRecord, persisted bool, paths logs.Paths) (runtime.Container, error) {
	record, err := anypb.New(r)
	if err != nil {
		return runtime.Container{}, fmt.Errorf("encoding the record of %s: %w", id, err)
	}
	env := maps.Clone(r.GetSpec().GetEnv())
	if tp := r.GetTraceparent(); tp != "" {
		if env == nil {
			env = map[string]string{}
		}
		env["TRACEPARENT"] = tp
	}
	return runtime.Container{
		ID: id, Record: record, Image: r.GetSpec().GetImage(), Command: r.GetSpec().GetCommand(), Args: r.GetSpec().GetArgs(),
		KeepAlive: r.GetSpec().GetKeepAlive(),
		Env:       env, WorkingDir: r.GetSpec().GetWorkingDir(), Hostname: r.GetName(), Limits: Limits(r).Effective(resources.Limits{}, l.config.MaxLimits), Network: Network(r),
		LogPath: paths.Output, HostnamePath: paths.Hostname,
		Labels: identity.Identity{
			Namespace: r.GetNamespace(), Name: r.GetName(), SandboxUID: r.GetFence().GetSandboxUid(), Attempt: r.GetFence().GetAttempt(),
			AgentUID: r.GetFence().GetAgentUid(), AgentProcess: l.config.Process, Pool: l.config.Pool,
			State: identity.StateClaimed, Persisted: persisted,
		}.Labels(),
	}, nil
}

// Network returns how a sandbox is connected.
func Network(r *agentv1.SandboxRecord) runtime.Network {
	if r.GetSpec().GetNetwork() == sandboxv1.NetworkMode_NETWORK_MODE_NONE {
		return runtime.NetworkNone
	}
	return runtime.NetworkAgent
}

// Limits returns the limits that a record has for its sandbox: those in force, or, in a record without them, those of its spec.
// Defaults apply to what the record does not set.
func Limits(r *agentv1.SandboxRecord) resources.Limits {
	limits := r.GetLimits()
	if limits == nil {
		limits = r.GetSpec().GetResources()
	}
	return resources.Limits{CPUMillis: limits.GetCpuMillis(), MemoryBytes: limits.GetMemoryBytes(), PIDs: limits.GetPids()}
}
