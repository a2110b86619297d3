package ctrd

import (
	"context"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/apparmor"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
)

// Internals under test.
var (
	StartFault       = startFault
	HandlesSignal    = handlesSignal
	PullFault        = func(err error, ref string) error { return pullFault(classifyPull(err), ref) }
	Classify         = classify
	CgroupParent     = cgroupParent
	ReadDockerConfig = readDockerConfig
	CheckProcess     = checkProcess
	Namespaces       = func(c runtime.Container, netns string) []specs.LinuxNamespace {
		return namespaces(c, &pod{netns: netns})
	}
	Resources  = cgroupResources
	Capability = capabilities
	Rlimits    = rlimits
	CgroupOf   = cgroupOf
	Lower      = lower
	PinChange  = pinChange
)

// Credentials returns a host's credentials.
func (c *dockerConfig) Credentials(host string) (string, string, error) { return c.credentials(host) }

// Cgroup returns the cgroup of a container below a parent.
func Cgroup(parent, id string) (string, bool) {
	p := &pod{cgroupParent: parent}
	return p.cgroup(id), p.systemd()
}

// CommandLine combines a request's command with an image's.
func CommandLine(c runtime.Container, config ocispec.ImageConfig) ([]string, error) {
	return commandLine(c, &image{config: config})
}

// Environment combines a request's environment with an image's.
func Environment(c runtime.Container, config ocispec.ImageConfig, home string) []string {
	return environment(c, &image{config: config}, home)
}

// Admit records blobs of an image, one call each, as a pull does.
func Admit(maxBytes int64, calls ...[]ocispec.Descriptor) error {
	t := &tracker{image: "i", maxBytes: maxBytes}
	for _, descs := range calls {
		if err := t.add(descs...); err != nil {
			return err
		}
	}
	return nil
}

// Pulls shares pulls.
type Pulls struct{ *pulls }

// NewPulls returns Pulls that call run.
func NewPulls(run func(context.Context, string, func(runtime.Progress)) error) Pulls {
	return Pulls{newPulls(run)}
}

// Do joins or begins a pull.
func (p Pulls) Do(ctx context.Context, name string, progress func(runtime.Progress)) error {
	return p.do(ctx, name, progress)
}

// Close cancels all pulls.
func (p Pulls) Close() { p.close() }

// PrepareMountpoints creates the mount points that a claim needs in a root.
var PrepareMountpoints = prepareMountpoints

// Groups has the slots of a process by group.
type Groups struct{ *groups }

// NewGroups returns Groups without slots.
func NewGroups() Groups { return Groups{newGroups()} }

// Join adds a slot and returns its group.
func (g Groups) Join(id, wanted string) string { return g.join(id, wanted) }

// Leave removes a slot.
func (g Groups) Leave(id string) { g.leave(id) }

// Joined reports whether a group has slots.
func (g Groups) Joined(group string) bool { return g.joined(group) }

// SetShimSize bounds the containers of a shim of ours.
func (r *Runtime) SetShimSize(n int) { r.shims.size = n }

// Confinement is whether sandboxes have the AppArmor profile.
type Confinement struct{ *confinement }

// NewConfinement returns a Confinement.
func NewConfinement(s apparmor.Status) Confinement { return Confinement{&confinement{status: s}} }

// Get returns the status.
func (c Confinement) Get() apparmor.Status { return c.get() }

// Profile returns the profile of the next sandbox.
func (c Confinement) Profile() string { return c.profile() }

// Observe looks at the error of a claim.
func (c Confinement) Observe(err error) { c.observe(err) }

// ShimStarted reads what a shim has found out.
func (c Confinement) ShimStarted(binary string) { c.shimStarted(binary) }

// SetAppArmor sets whether sandboxes have the AppArmor profile.
func (r *Runtime) SetAppArmor(s apparmor.Status) { r.confinement.set(s) }

// Probe is what the node was found to be able to do.
type Probe struct{ *probe }

// NewProbe returns a Probe that calls try.
func NewProbe(c clock.PassiveClock, try func() error) Probe { return Probe{&probe{clock: c, try: try}} }

// Result returns the error of the last try.
func (p Probe) Result() error { return p.result() }

// Recheck tries again if the last try has failed and is old enough.
func (p Probe) Recheck() error { return p.recheck() }

// Connect connects to the sandbox-init of a container, at a socket.
func (r *Runtime) Connect(ctx context.Context, id, socket string) error {
	s := &slot{}
	defer s.close()
	return r.connect(ctx, s, id, socket, exists)
}
