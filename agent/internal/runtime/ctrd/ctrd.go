// Package ctrd runs containers on the host's containerd, through APIs that both containerd 1.6 and 2 have. It never
// decides what should run. All of it may be called concurrently.
//
// The parts of a container, and what protects each from containerd's garbage collector while the container is created:
//
//	image      pulled under a lease of containerd's client; its layers are then held by the image
//	container  a root of the collector, and the evidence from which a crash is cleaned up
//	snapshot   held by the container's record. The two are created concurrently; once both exist the snapshot is checked,
//	           and created again in the rare case that the collector ran in between
//	task       held by its shim
//
// A slot is a container whose record names its snapshot before that exists, and whose task runs sandbox-init. A claim
// rewrites the record, creates the snapshot, and passes it to that process; see claim.go.
package ctrd

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/singleflight"
	"google.golang.org/protobuf/types/known/anypb"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/apparmor"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd/node"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
)

// Config says how containers are run.
type Config struct {
	// Client of containerd.
	Client *client.Client
	// Handler of all containers.
	Handler shared.Handler
	// Snapshotter keeps the root file systems.
	Snapshotter string
	// LogRoot holds a directory for each container, at the same path on the host and here.
	LogRoot string
	// PodUID is the uid of the Pod whose network and cgroup the containers join.
	PodUID string
	// NetNSPath and CgroupParent override what is found through PodUID. Each may be empty.
	NetNSPath, CgroupParent string
	// CgroupRoot is where the host's cgroups are mounted here. Empty: /sys/fs/cgroup.
	CgroupRoot string
	// DockerConfig is a file with registry credentials (Docker's config.json), read at each pull; empty for none.
	DockerConfig string
	// InsecureRegistries are hosts (host or host:port) that are reached over plain HTTP, besides loopback.
	InsecureRegistries []string
	// VerifyImages has each create ask the registry, with these credentials, before it uses an image that is on the node.
	VerifyImages bool
	// MaxImageBytes bounds what one pull downloads. Zero: DefaultMaxImageBytes.
	MaxImageBytes int64
	// SlotRoot is a directory for the root of slots, at the same path on the host and here, on a file system from which
	// programs can be run; empty for no slots, and for no supervisors in containers of runc. SandboxInit is the binary of both.
	SlotRoot, SandboxInit string
	// AddCapabilities are added to the default capabilities of sandboxes, as CheckCapabilities allows them.
	AddCapabilities []string
	// AppArmor is whether sandboxes have the AppArmor profile. With the handler fsb, shims find that out.
	AppArmor apparmor.Status
	// Shim is the binary of the shim of the handler fsb. It is installed below SlotRoot.
	Shim string
	// Users says whether containers have user namespaces, of the ranges in IDs. Empty: UsersDisabled.
	Users UserNamespace
	IDs   idrange.Ranges
	// Clock; nil is the real one.
	Clock clock.WithTicker
}

// Runtime drives one containerd. Make it with New.
type Runtime struct {
	*imageStore
	*taskSet

	config    Config
	client    *client.Client
	remover   *shared.Remover
	pods      *podFinder
	specs     *specBuilder
	slots     *slots
	slotRoots *slotRoots
	groups    *groups // of containerd's shims
	shims     *shims  // of ours
	support   *support
	joins     singleflight.Group // supervisors that are being started, by container
	pending   *pendingStarts
	users     *userNamespaces
	cgroups   func() (*cgroup.Tree, error)

	confinement *confinement
	settled     atomic.Bool // whether settle has succeeded
}

var (
	_ runtime.Runtime = (*Runtime)(nil)
	_ runtime.Slots   = (*Runtime)(nil)
)

// New returns a Runtime. It does no I/O to containerd.
func New(cfg Config) *Runtime {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	if cfg.Snapshotter == "" {
		cfg.Snapshotter = shared.DefaultSnapshotter
	}
	if cfg.MaxImageBytes == 0 {
		cfg.MaxImageBytes = DefaultMaxImageBytes
	}
	if cfg.CgroupRoot == "" {
		cfg.CgroupRoot = shared.DefaultCgroupRoot
	}
	groups := newGroups()
	roots := &slotRoots{dir: cfg.SlotRoot, init: cfg.SandboxInit, shim: cfg.Shim}
	users := newUserNamespaces(cfg, roots)
	images := newImageStore(cfg, users)
	confined := &confinement{status: cfg.AppArmor}
	support := &support{client: cfg.Client, binary: roots.shimPath}
	shims := newShims(cmp.Or(cfg.PodUID, shared.NoPod), support, confined.shimStarted)
	specs := newSpecBuilder(images, cfg.AddCapabilities, confined.profile)
	specs.programs = programsOf(cfg, roots)
	return &Runtime{
		confinement: confined, users: users,
		shims: shims, support: support, pending: &pendingStarts{held: map[string]*pendingStart{}},
		cgroups:    sync.OnceValues(func() (*cgroup.Tree, error) { return cgroup.Open(cfg.CgroupRoot) }),
		imageStore: images, taskSet: &taskSet{client: cfg.Client, clock: cfg.Clock, lost: shims.lost}, config: cfg, client: cfg.Client,
		pods: &podFinder{client: cfg.Client, config: cfg}, specs: specs, groups: groups,
		slots: &slots{held: map[string]*slot{}}, slotRoots: roots,
		remover: &shared.Remover{
			Client: cfg.Client, Snapshotter: cfg.Snapshotter, LogRoot: cfg.LogRoot, Ranges: cfg.IDs,
			ProcRoot: "/proc", CgroupRoot: cfg.CgroupRoot, Clock: cfg.Clock, JoinsGroup: func(group string) bool { return groups.joined(group) || shims.joined(group) },
		},
	}
}

// Close cancels the pulls that still run, waits for them, ends all free slots, and ends the use of the installed shim.
func (r *Runtime) Close() {
	r.pulls.close()
	r.slots.endAll()
	r.slotRoots.closeShim()
}

// Ping asks containerd for its version and finds the agent's Pod. It fails if the pool requires what the node does not have. What the node
// could not do is tried again at times.
func (r *Runtime) Ping(ctx context.Context) error {
	if _, err := r.client.Version(ctx); err != nil {
		r.support.forget() // another version may be the next to answer
		return classify(err, "asking containerd for its version")
	}
	if _, err := r.pods.find(ctx); err != nil {
		return err
	}
	if r.config.Handler.IsOwn() {
		if err := r.support.check(ctx); err != nil {
			return err
		}
	}
	r.users.recheck()
	return r.users.unusable()
}

// settle waits until containerd has carried out the changes that an earlier process of this agent had sent when it was killed: it
// completes a write although the client is gone, and a container that appeared after the agent had listed them would be left.
func (r *Runtime) settle(ctx context.Context) error {
	if r.settled.Load() {
		return nil
	}
	if err := shared.AwaitWrites(ctx, r.client); err != nil {
		return classify(err, "adopting containers")
	}
	if r.config.Handler.IsOwn() {
		if err := r.shims.sweep(ctx); err != nil {
			return err
		}
		if err := r.sweepIDs(ctx); err != nil {
			return err
		}
	}
	r.settled.Store(true)
	return nil
}

// List reads the containers and then, in one call, all tasks. The first call waits for what was written before.
func (r *Runtime) List(ctx context.Context, labels map[string]string) ([]runtime.Found, error) {
	if err := r.settle(ctx); err != nil {
		return nil, err
	}
	var filter string
	for k, v := range labels {
		if filter != "" {
			filter += ","
		}
		filter += fmt.Sprintf("labels.%q==%q", k, v)
	}
	var filters []string
	if filter != "" {
		filters = []string{filter}
	}
	containers, err := r.client.ContainerService().List(ctx, filters...)
	if err != nil {
		return nil, classify(err, "listing containers")
	}
	states, err := r.states(ctx)
	if err != nil {
		return nil, err
	}
	found := make([]runtime.Found, 0, len(containers))
	for _, c := range containers {
		found = append(found, runtime.Found{
			ID: c.ID, Labels: c.Labels, Record: extension(c, shared.RecordKey), Report: extension(c, shared.ReportKey),
			CreatedAt: c.CreatedAt, Task: states[c.ID], Claiming: r.claiming(c),
		})
	}
	slices.SortFunc(found, func(a, b runtime.Found) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	return found, nil
}

// Delete removes a container and everything that belongs to it.
func (r *Runtime) Delete(ctx context.Context, id string) error {
	r.deleting.Store(id, nil)
	defer r.deleting.Delete(id)
	r.slots.end(id)
	r.pending.end(id)
	r.groups.leave(id)
	r.shims.leave(id)
	err := r.remover.Remove(ctx, id)
	if err == nil {
		err = r.shims.reclaim(ctx, r.remover)
	}
	if err == nil {
		return nil
	}
	known := classify(err, "deleting container %s", id)
	if ctx.Err() != nil || errdefs.IsInvalidArgument(err) || fault.ReasonOf(known) != "" {
		return known
	}
	// Other errors (a step that took too long, a shim that is ending, a mount that is busy) may not occur again.
	return fault.Wrap(err, errdefs.ErrUnavailable, fault.RuntimeUnavailable, "container %s could not be removed yet", id)
}

const finishTimeout = 20 * time.Second

// Finish writes the report and then removes the task, in this order: before the report is written, the stopped task is the
// evidence of the exit; afterwards the report is.
func (r *Runtime) Finish(ctx context.Context, id string, report *anypb.Any) error {
	ctx, cancel := context.WithTimeout(ctx, finishTimeout)
	defer cancel()
	_, err := r.client.ContainerService().Update(ctx, containers.Container{
		ID: id, Extensions: map[string]typeurl.Any{shared.ReportKey: report},
	}, "extensions."+shared.ReportKey)
	if err != nil {
		if errdefs.IsNotFound(err) {
			return fmt.Errorf("keeping the report of container %s: %w", id, err)
		}
		return classify(err, "keeping the report of container %s", id)
	}
	r.groups.leave(id) // the shim may end with the task
	r.shims.leave(id)
	if err := r.remover.RemoveTask(ctx, id); err != nil {
		return classify(err, "finishing container %s", id)
	}
	return nil
}

// SetLabel changes one label and nothing else.
func (r *Runtime) SetLabel(ctx context.Context, id, key, value string) error {
	if _, err := r.client.ContainerService().Update(ctx, labeled(id, key, value), "labels."+key); err != nil {
		if errdefs.IsNotFound(err) {
			return fmt.Errorf("labeling container %s: %w", id, err)
		}
		return classify(err, "labeling container %s", id)
	}
	return nil
}

func labeled(id, key, value string) containers.Container {
	return containers.Container{ID: id, Labels: map[string]string{key: value}}
}

func extension(c containers.Container, key string) *anypb.Any {
	e, ok := c.Extensions[key]
	if !ok {
		return nil
	}
	return &anypb.Any{TypeUrl: e.GetTypeUrl(), Value: e.GetValue()}
}

// limit gives the cgroup of a container its limits.
func (r *Runtime) limit(s *specs.Spec) error {
	tree, err := r.cgroups()
	if err != nil {
		return err
	}
	return tree.Limit(node.CgroupPath(s.Linux.CgroupsPath), s.Linux.Resources)
}

// boundCPU lowers a CPU limit to what the cgroup of a container can have.
func (r *Runtime) boundCPU(millis int64, cgroupsPath string) int64 {
	tree, err := r.cgroups()
	if err != nil {
		return millis
	}
	return tree.BoundCPU(millis, node.CgroupPath(cgroupsPath))
}
