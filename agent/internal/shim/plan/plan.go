// Package plan decides, from the OCI spec of a container, what a shim does to start sandbox-init for it. It does no I/O. A spec that asks for
// anything else than what sandboxes have is refused as a whole: nothing of a spec is ever skipped silently.
//
// The part of a spec that says what runs (arguments, environment, user, seccomp filter, working directory) is not the shim's: sandbox-init gets
// it with its claim.
package plan

import (
	"encoding/json"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/layout"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd/node"
	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
)

// Annotations of a spec.
const (
	// RootAnnotation is the directory, on the host, with the root of slots.
	RootAnnotation = "fast-sandbox.io/slot-root"
	// AnchorAnnotation is "true" for the container that stands for a shim. It has no process of its own.
	AnchorAnnotation = "fast-sandbox.io/anchor"
	// ShimCgroupAnnotation is the cgroup of the shim of an anchor.
	ShimCgroupAnnotation = "fast-sandbox.io/shim-cgroup"
	// PrivateAnnotation is the directory, on the host, for the claim's socket.
	PrivateAnnotation = "fast-sandbox.io/private-dir"
)

// InitEnded is in the error of a create whose sandbox-init ended before its container was made. Agents look for the text: containerd passes no
// other detail on.
const InitEnded = "sandbox-init has ended"

// NoShim is in the error of a create whose container is to be in a shim that containerd does not know. Agents look for that text, too.
const NoShim = "names no sandbox (a shim) to be in"

// Plan is how a container is started.
type Plan struct {
	// Anchor is a container without a process; all other fields are empty, except ShimCgroup.
	Anchor bool
	// ShimCgroup is the path of the shim's cgroup; empty for containerd's.
	ShimCgroup string

	// Cgroup is the path of the container's cgroup, and Resources its limits.
	Cgroup    string
	Resources *specs.LinuxResources
	// Network is the path of the network namespace; empty for one of its own, if OwnNetwork, and else for the host's.
	Network    string
	OwnNetwork bool
	// OwnCgroup gives it a cgroup namespace.
	OwnCgroup bool
	// FirstID is the first id of the container's user namespace; zero if it has none.
	FirstID uint32
	// OOMScoreAdj, if not nil, is that of the container's processes.
	OOMScoreAdj *int32
	// Root is the directory with the root of slots.
	Root string
	// Mounts are made on the host, and attached in the slot with the descriptors 1, 2, … of Setup. One of Type Sysfs is the last.
	Mounts []Mount
	// Setup is sandbox-init's part.
	Setup wire.Setup
}

// Mount is a mount that only the host can make for the container.
type Mount struct {
	// Type is empty for a bind mount of the file or directory Source; Devices, or sysfs of the network namespace that the container joins.
	Type   string
	Source string
	// Options are those of a file system of Type Devices, in the form of mount(8).
	Options string
	// Attributes are MOUNT_ATTR_*.
	Attributes uint64
}

// The types of mounts that are no bind mounts.
const (
	// Devices is a tmpfs with the devices of a container.
	Devices = "devices"
	Sysfs   = "sysfs"
)

// Parse reads a spec. The error is errdefs.ErrInvalidArgument, and names what the runtime cannot do.
func Parse(raw []byte) (*Plan, error) {
	var s specs.Spec
	if err := json.Unmarshal(raw, &s); err != nil {
		return nil, fmt.Errorf("reading the OCI spec: %w: %w", errdefs.ErrInvalidArgument, err)
	}
	p := &Plan{ShimCgroup: s.Annotations[ShimCgroupAnnotation]}
	if s.Annotations[AnchorAnnotation] == "true" {
		p.Anchor = true
		return p, nil
	}
	for _, step := range []func(*specs.Spec) error{p.refuse, p.process, p.namespaces, p.mounts, p.linux} {
		if err := step(&s); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func unsupported(format string, args ...any) error {
	return fmt.Errorf("the runtime does not support "+format+": %w", append(args, errdefs.ErrInvalidArgument)...)
}

// refuse refuses what no sandbox has.
func (p *Plan) refuse(s *specs.Spec) error {
	l := s.Linux
	switch {
	case s.Process == nil || s.Root == nil || l == nil:
		return unsupported("a spec without process, root and linux")
	case s.Solaris != nil || s.Windows != nil || s.VM != nil || s.ZOS != nil || s.FreeBSD != nil || s.Process.CommandLine != "" || s.Process.User.Username != "":
		return unsupported("the parts of a spec for other systems than Linux")
	case s.Process.Terminal || s.Process.ConsoleSize != nil:
		return unsupported("a terminal as the standard streams of a container")
	case s.Hooks != nil:
		return unsupported("hooks")
	case s.Domainname != "":
		return unsupported("a domain name")
	case s.Process.SelinuxLabel != "" || l.MountLabel != "":
		return unsupported("SELinux labels")
	case s.Process.IOPriority != nil || s.Process.Scheduler != nil || s.Process.ExecCPUAffinity != nil:
		return unsupported("scheduling attributes")
	case len(l.Sysctl) > 0:
		return unsupported("sysctls")
	case len(l.Devices) > 0 || len(l.NetDevices) > 0:
		return unsupported("additional devices")
	case l.RootfsPropagation != "":
		return unsupported("propagation of the root's mounts")
	case l.IntelRdt != nil || l.Personality != nil || len(l.TimeOffsets) > 0 || l.MemoryPolicy != nil:
		return unsupported("intelRdt, personality, memory policies and time offsets")
	}
	return nil
}

func (p *Plan) process(s *specs.Spec) error {
	request, err := claim.FromSpec(s)
	if err != nil {
		return err
	}
	p.Setup.Hostname = s.Hostname
	p.Setup.Rlimits, p.OOMScoreAdj = request.Rlimits, request.OOMScoreAdj
	// init makes the root of the sandbox and loads its filter.
	const own = 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_SETPCAP
	caps := request.Capabilities.Bounding | own
	p.Setup.Capabilities = wire.Capabilities{Bounding: caps, Effective: caps, Permitted: caps}
	if p.Root = s.Annotations[RootAnnotation]; !filepath.IsAbs(p.Root) {
		return unsupported("a spec without the annotation %s", RootAnnotation)
	}
	if dir := s.Annotations[PrivateAnnotation]; dir != "" {
		p.add(Mount{Source: dir, Attributes: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC}, layout.PrivateDir)
	}
	return nil
}

func (p *Plan) namespaces(s *specs.Spec) error {
	seen := map[specs.LinuxNamespaceType]bool{}
	for _, n := range s.Linux.Namespaces {
		if n.Path != "" && n.Type != specs.NetworkNamespace {
			return unsupported("joining a %s namespace", n.Type)
		}
		seen[n.Type] = true
		switch n.Type {
		case specs.NetworkNamespace:
			p.Network, p.OwnNetwork = n.Path, n.Path == ""
		case specs.CgroupNamespace:
			p.OwnCgroup = true
		case specs.UserNamespace, specs.PIDNamespace, specs.MountNamespace, specs.IPCNamespace, specs.UTSNamespace:
		default:
			return unsupported("a %s namespace", n.Type)
		}
	}
	for _, t := range []specs.LinuxNamespaceType{specs.PIDNamespace, specs.MountNamespace, specs.IPCNamespace, specs.UTSNamespace} {
		if !seen[t] {
			return unsupported("sharing the host's %s namespace", t)
		}
	}
	p.Setup.Loopback = p.OwnNetwork
	return p.users(s.Linux, seen[specs.UserNamespace])
}

// users reads the mappings of a user namespace: one range, the same for users and groups.
func (p *Plan) users(l *specs.Linux, own bool) error {
	if !own {
		if len(l.UIDMappings) > 0 || len(l.GIDMappings) > 0 {
			return unsupported("id mappings without a user namespace")
		}
		return nil
	}
	if len(l.UIDMappings) != 1 || !slices.Equal(l.UIDMappings, l.GIDMappings) {
		return unsupported("id mappings other than one range, the same for users and groups")
	}
	m := l.UIDMappings[0]
	if m.ContainerID != 0 || m.Size != idrange.Size || m.HostID < idrange.Size || uint64(m.HostID)+idrange.Size > math.MaxUint32 {
		return unsupported("the id mapping from %d to %d of %d ids", m.ContainerID, m.HostID, m.Size)
	}
	p.FirstID, p.Setup.UserNamespace = m.HostID, true
	return nil
}

func (p *Plan) mounts(s *specs.Spec) error {
	for _, m := range s.Mounts {
		if len(m.UIDMappings) > 0 || len(m.GIDMappings) > 0 {
			return unsupported("id mappings of mount %s", m.Destination)
		}
		if !filepath.IsAbs(m.Destination) || filepath.Clean(m.Destination) != m.Destination {
			return unsupported("the mount point %q", m.Destination)
		}
		if m.Type == "bind" {
			if err := p.file(m); err != nil {
				return err
			}
			continue
		}
		if !slices.Contains([]string{"proc", "tmpfs", "devpts", "mqueue", "sysfs", "cgroup"}, m.Type) {
			return unsupported("mounts of type %q", m.Type)
		}
		if p.made(m) {
			continue
		}
		flags, data := options(m.Options)
		kind := m.Type
		if kind == "cgroup" {
			kind = "cgroup2"
		}
		p.Setup.Mounts = append(p.Setup.Mounts, wire.SetupMount{Destination: m.Destination, Type: kind, Data: data, Flags: flags})
	}
	return p.sysfsLast()
}

// made has the host make a mount, if sandbox-init could not make it in a user namespace: devices, and the view of a network namespace that is
// not of that user namespace. It is the same without one, so that there is one way.
func (p *Plan) made(m specs.Mount) bool {
	kind := ""
	switch {
	case m.Destination == "/dev" && m.Type == "tmpfs":
		kind = Devices
	case m.Type == "sysfs" && !p.OwnNetwork:
		kind = Sysfs
	default:
		return false
	}
	made := Mount{Type: kind}
	var rest []string
	for _, o := range m.Options {
		set, err := attributes([]string{o})
		switch {
		case o == "strictatime":
			set = unix.MOUNT_ATTR_STRICTATIME
		case err != nil && o != "relatime":
			rest = append(rest, o) // the file system's own, which the kernel refuses if it does not know it
		}
		made.Attributes |= set
	}
	made.Options = strings.Join(rest, ",")
	p.add(made, m.Destination)
	return true
}

// sysfsLast moves the mount that is made in the network namespace, after all others, to the end.
func (p *Plan) sysfsLast() error {
	isSysfs := func(m Mount) bool { return m.Type == Sysfs }
	at := slices.IndexFunc(p.Mounts, isSysfs)
	if at < 0 {
		return nil
	}
	last := p.Mounts[at]
	if p.Mounts = slices.Delete(p.Mounts, at, at+1); slices.ContainsFunc(p.Mounts, isSysfs) {
		return unsupported("two mounts of sysfs")
	}
	p.Mounts = append(p.Mounts, last)
	for i, m := range p.Setup.Mounts {
		switch first := uint32(at) + 1; {
		case m.FD == first:
			p.Setup.Mounts[i].FD = uint32(len(p.Mounts))
		case m.FD > first:
			p.Setup.Mounts[i].FD--
		}
	}
	return nil
}

// file has a file of the host bound where the slot keeps it for the claim.
func (p *Plan) file(m specs.Mount) error {
	destination := m.Destination
	attributes, err := attributes(m.Options)
	if err != nil {
		return err
	}
	switch {
	case destination == layout.PrivateDir:
		p.add(Mount{Source: m.Source, Attributes: attributes}, destination)
		return nil
	case filepath.Dir(destination) == "/etc" && slices.Contains(layout.RootFiles(), filepath.Base(destination)):
		destination = layout.File(destination)
	case filepath.Dir(destination) != layout.FilesDir:
		return unsupported("a bind mount at %s", destination)
	}
	if !filepath.IsAbs(m.Source) {
		return unsupported("the source %q of mount %s", m.Source, m.Destination)
	}
	p.add(Mount{Source: m.Source, Attributes: attributes}, destination)
	return nil
}

func (p *Plan) add(m Mount, destination string) {
	p.Mounts = append(p.Mounts, m)
	p.Setup.Mounts = append(p.Setup.Mounts, wire.SetupMount{Destination: destination, FD: uint32(len(p.Mounts))})
}

func (p *Plan) linux(s *specs.Spec) error {
	l := s.Linux
	if l.CgroupsPath == "" {
		return unsupported("a spec without a cgroup")
	}
	p.Cgroup = node.CgroupPath(l.CgroupsPath)
	if !filepath.IsAbs(p.Cgroup) || filepath.Clean(p.Cgroup) != p.Cgroup || p.Cgroup == "/" {
		return unsupported("the cgroup %q", l.CgroupsPath)
	}
	p.Setup.Masked, p.Setup.Readonly = l.MaskedPaths, l.ReadonlyPaths
	r := l.Resources
	if r == nil {
		return nil
	}
	if err := Supported(r); err != nil {
		return err
	}
	p.Resources = r
	return nil
}

// Supported returns an error if limits contain one that the runtime does not know.
func Supported(r *specs.LinuxResources) error {
	deny := specs.LinuxDeviceCgroup{Allow: false, Access: "rwm"}
	switch {
	case len(r.Devices) > 1 || len(r.Devices) == 1 && (r.Devices[0].Allow || r.Devices[0].Access != deny.Access || r.Devices[0].Major != nil || r.Devices[0].Minor != nil):
		return unsupported("rules for devices")
	case r.BlockIO != nil || len(r.HugepageLimits) > 0 || r.Network != nil || len(r.Rdma) > 0 || len(r.Unified) > 0:
		return unsupported("limits of anything but cpu, memory and pids")
	}
	if c := r.CPU; c != nil && (c.Burst != nil || c.RealtimePeriod != nil || c.RealtimeRuntime != nil || c.Cpus != "" || c.Mems != "" || c.Idle != nil) {
		return unsupported("limits of cpu other than shares, quota and period")
	}
	if m := r.Memory; m != nil && (m.CheckBeforeUpdate != nil || m.Reservation != nil || m.Kernel != nil || m.KernelTCP != nil || m.Swappiness != nil || m.DisableOOMKiller != nil || m.UseHierarchy != nil) { //nolint:staticcheck // deprecated, but valid
		return unsupported("limits of memory other than limit and swap")
	}
	return nil
}

// options translates mount options into flags and data for mount(2).
func options(list []string) (flags uint64, data string) {
	known := map[string]uint64{
		"nosuid": unix.MS_NOSUID, "nodev": unix.MS_NODEV, "noexec": unix.MS_NOEXEC, "ro": unix.MS_RDONLY, "rw": 0,
		"strictatime": unix.MS_STRICTATIME, "relatime": unix.MS_RELATIME,
	}
	var rest []string
	for _, o := range list {
		if f, ok := known[o]; ok {
			flags |= f
			continue
		}
		rest = append(rest, o)
	}
	return flags, strings.Join(rest, ",")
}

// attributes translates mount options into MOUNT_ATTR_*; what is mounted is private in any case.
func attributes(list []string) (uint64, error) {
	known := map[string]uint64{
		"ro": unix.MOUNT_ATTR_RDONLY, "nosuid": unix.MOUNT_ATTR_NOSUID, "nodev": unix.MOUNT_ATTR_NODEV, "noexec": unix.MOUNT_ATTR_NOEXEC,
		"rw": 0, "bind": 0, "rbind": 0, "private": 0, "rprivate": 0,
	}
	var set uint64
	for _, o := range list {
		attribute, ok := known[o]
		if !ok {
			return 0, unsupported("the option %q of a bind mount", o)
		}
		set |= attribute
	}
	return set, nil
}
