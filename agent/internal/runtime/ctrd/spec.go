package ctrd

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/layout"
	filter "github.com/fast-sandbox/fast-sandbox/agent/internal/slot/seccomp"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
)

// specVersion is one that runc 1.1 and crun 1.8 accept; no newer feature is used.
const specVersion = "1.0.2"

const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// specBuilder builds OCI specs and claims, so that both ways to start a sandbox end in the same confinement.
type specBuilder struct {
	images  *imageStore
	caps    []string               // that a sandbox ever has; does not change
	oom     int                    // oom_score_adj of containers
	rlimits []specs.POSIXRlimit    // of all containers; does not change
	seccomp *specs.LinuxSeccomp    // the same
	filter  func() ([]byte, error) // seccomp, compiled once
	profile func() string          // of AppArmor, or empty
	// programs returns the path of the programs of supervisors that join containers; empty if none do.
	programs func() string
}

// newSpecBuilder returns a specBuilder. Sandboxes have the default capabilities and the added ones; see GrantableCapabilities. apparmor
// returns the AppArmor profile that is loaded.
func newSpecBuilder(images *imageStore, added []string, apparmor func() string) *specBuilder {
	caps := capabilities(added)
	b := &specBuilder{images: images, profile: apparmor, caps: caps, oom: oomScoreAdj(), rlimits: rlimits(), seccomp: profile(caps)}
	b.filter = sync.OnceValues(func() ([]byte, error) { return filter.Compile(b.seccomp) })
	return b
}

// sandbox builds the OCI spec. An error in the request is a fault that names the field.
func (b *specBuilder) sandbox(ctx context.Context, c runtime.Container, img *image, p *pod) (*specs.Spec, error) {
	args, err := commandLine(c, img)
	if err != nil {
		return nil, err
	}
	user, home, err := b.images.user(ctx, img)
	if err != nil {
		return nil, err
	}
	cwd := c.WorkingDir
	if cwd == "" {
		cwd = img.config.WorkingDir
	}
	if cwd == "" {
		cwd = "/"
	}
	if !filepath.IsAbs(cwd) {
		return nil, fault.Field("spec.working_dir", "%q is not an absolute path", cwd)
	}
	env := environment(c, img, home)
	if err := checkProcess(args, env); err != nil {
		return nil, err
	}
	s := &specs.Spec{
		Version: specVersion,
		Root:    &specs.Root{Path: "rootfs"},
		Process: &specs.Process{
			User: user, Args: args, Env: env, Cwd: cwd,
			Capabilities:    &specs.LinuxCapabilities{Bounding: b.caps, Effective: b.caps, Permitted: b.caps},
			NoNewPrivileges: true,
			ApparmorProfile: b.profile(),
			OOMScoreAdj:     &b.oom,
			Rlimits:         b.rlimits,
		},
		Hostname: c.Hostname,
		Mounts:   slices.Concat(mounts(c, p), b.joinMounts(filepath.Join(filepath.Dir(c.LogPath), shared.ClaimedDir))),
		Linux: &specs.Linux{
			CgroupsPath:   p.cgroup(c.ID),
			Namespaces:    namespaces(c, p),
			Resources:     cgroupResources(c.Limits),
			MaskedPaths:   maskedPaths(),
			ReadonlyPaths: readonlyPaths(),
			Seccomp:       b.seccomp,
		},
	}
	if user.UID != 0 {
		// As the kernel does on an exec by an ordinary user.
		s.Process.Capabilities.Effective, s.Process.Capabilities.Permitted = nil, nil
	}
	return s, nil
}

// initCapabilities returns what sandbox-init needs to build a root, beyond what its command keeps.
func initCapabilities() []string { return []string{"CAP_SYS_ADMIN"} }

// slot returns the spec of a slot: the part of a sandbox's spec that does not depend on the sandbox, with the privileges
// that sandbox-init drops at the claim.
func (b *specBuilder) slot(s runtime.Slot, p *pod, rootfs, dir string) *specs.Spec {
	c := runtime.Container{ID: s.ID, HostnamePath: s.HostnamePath, Network: runtime.NetworkAgent}
	caps := slices.Concat(b.caps, initCapabilities())
	list := mounts(c, p)
	for i, m := range list {
		if m.Type == "bind" {
			list[i].Destination = layout.File(m.Destination)
		}
	}
	list = append(list, b.joinMounts(dir)...)
	list = append(list, specs.Mount{Destination: layout.PrivateDir, Type: "bind", Source: dir, Options: []string{"bind", "rprivate", "rw", "nosuid", "nodev", "noexec"}})
	return &specs.Spec{
		Version: specVersion,
		Root:    &specs.Root{Path: rootfs, Readonly: true},
		Process: &specs.Process{
			Args: []string{layout.InitPath}, Env: claim.Environment(), Cwd: "/", OOMScoreAdj: &b.oom, Rlimits: b.rlimits,
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps},
		},
		Hostname:    "slot",
		Mounts:      list,
		Annotations: map[string]string{shared.GroupAnnotation: s.Group},
		Linux: &specs.Linux{
			CgroupsPath: p.cgroup(s.ID), Namespaces: namespaces(c, p), Resources: cgroupResources(c.Limits),
			MaskedPaths: maskedPaths(), ReadonlyPaths: readonlyPaths(),
		},
	}
}

// claim translates the OCI spec into a claim.
func (b *specBuilder) claim(s *specs.Spec) (*claim.Claim, error) {
	c, err := claim.FromSpec(s)
	if err != nil {
		return nil, err
	}
	if c.Seccomp, err = b.filter(); err != nil {
		return nil, err
	}
	for _, m := range s.Mounts {
		if m.Type == "bind" && !isJoinMount(m) { // the slot has the others already
			c.Mounts = append(c.Mounts, claim.Mount{Destination: m.Destination, Path: layout.File(m.Destination), Attributes: attributes(m.Options)})
		}
	}
	return c, nil
}

// profile returns the seccomp profile of every container with these capabilities.
func profile(caps []string) *specs.LinuxSeccomp {
	p := seccomp.DefaultProfile(&specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: caps}}, Linux: &specs.Linux{}})
	if len(p.Architectures) > 1 {
		// Only the native system calls. The 32-bit ones double the time that the OCI runtime takes to compile the filter,
		// a sixth of a whole create, and are the larger part of the attack surface.
		p.Architectures = p.Architectures[:1]
	}
	return p
}

// maxString is the longest argument, or name and value in the environment, that Linux accepts (MAX_ARG_STRLEN without the
// zero at its end). OCI runtimes hit the limit when they can no longer report it.
const maxString = 32*4096 - 1

// checkProcess refuses what no process can be given.
func checkProcess(args, env []string) error {
	tooLong := func(s string) bool { return len(s) > maxString }
	switch {
	case slices.ContainsFunc(args, tooLong):
		return fault.Field("spec.args", "an argument is longer than the %d bytes that a process can be given", maxString)
	case slices.ContainsFunc(env, tooLong):
		return fault.Field("spec.env", "a variable is longer than the %d bytes that a process can be given", maxString)
	case slices.ContainsFunc(env, func(s string) bool { return strings.ContainsRune(s, 0) }):
		return fault.Field("spec.env", "a variable has a zero byte in it")
	}
	return nil
}

// commandLine combines the request's command with the image's, as Kubernetes does: a command replaces the image's entry point
// and arguments, arguments alone keep the entry point. A container that is kept alive has none.
func commandLine(c runtime.Container, img *image) ([]string, error) {
	if c.KeepAlive {
		return nil, nil
	}
	command, args := c.Command, c.Args
	if len(command) == 0 {
		command = img.config.Entrypoint
		if len(args) == 0 {
			args = img.config.Cmd
		}
	}
	line := slices.Concat(command, args)
	if len(line) == 0 || line[0] == "" {
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.CommandNotFound, "spec.command is empty and image %s has none", img.name).
			With(fault.FieldKey, "spec.command")
	}
	for _, a := range line {
		if strings.ContainsRune(a, 0) {
			return nil, fault.Field("spec.args", "an argument has a zero byte in it")
		}
	}
	return line, nil
}

// environment returns the image's environment, overridden by the request's, in a fixed order.
func environment(c runtime.Container, img *image, home string) []string {
	env := slices.Clone(img.config.Env)
	set := func(key, value string, replace bool) {
		is := func(kv string) bool { k, _, _ := strings.Cut(kv, "="); return k == key }
		at := slices.IndexFunc(env, is)
		switch {
		case at < 0:
			env = append(env, key+"="+value)
		case replace:
			env[at] = key + "=" + value
			// An image may have it twice, and programs differ in which one counts.
			env = append(env[:at+1], slices.DeleteFunc(env[at+1:], is)...)
		}
	}
	path, _ := strings.CutPrefix(defaultPath, "PATH=")
	set("PATH", path, false)
	if c.Hostname != "" {
		set("HOSTNAME", c.Hostname, true)
	}
	keys := make([]string, 0, len(c.Env))
	for k := range c.Env {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		set(k, c.Env[k], true)
	}
	if home != "" {
		set("HOME", home, false)
	}
	return env
}

func namespaces(c runtime.Container, p *pod) []specs.LinuxNamespace {
	ns := []specs.LinuxNamespace{
		{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace},
	}
	if cgroup.Unified() {
		ns = append(ns, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	}
	switch {
	case c.Network == runtime.NetworkNone:
		// The OCI runtime creates the namespace and brings its loopback up.
		ns = append(ns, specs.LinuxNamespace{Type: specs.NetworkNamespace})
	case p.netns != "":
		ns = append(ns, specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: p.netns})
	}
	return ns
}

func mounts(c runtime.Container, p *pod) []specs.Mount {
	list := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
		{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
	}
	if cgroup.Unified() {
		list = append(list, specs.Mount{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"nosuid", "noexec", "nodev", "relatime", "ro"}})
	}
	file := func(destination, source string) {
		if source != "" {
			list = append(list, specs.Mount{Destination: destination, Type: "bind", Source: source, Options: []string{"rbind", "rprivate", "ro", "nosuid", "nodev", "noexec"}})
		}
	}
	file("/etc/hostname", c.HostnamePath)
	if c.Network == runtime.NetworkAgent {
		file("/etc/hosts", p.hosts)
		file("/etc/resolv.conf", p.resolv)
	}
	return list
}

func maskedPaths() []string {
	return []string{
		"/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats",
		"/proc/sched_debug", "/proc/scsi", "/proc/interrupts", "/sys/firmware", "/sys/devices/virtual/powercap",
	}
}

func readonlyPaths() []string {
	return []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
}

// cgroupResources returns the container's cgroup settings: only the devices that the OCI runtime always allows, and the limits.
func cgroupResources(l resources.Limits) *specs.LinuxResources {
	const period = uint64(100_000)
	res := &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}}
	if l.CPUMillis > 0 {
		p, quota := period, max(l.CPUMillis*int64(period)/1000, 1000)
		shares := uint64(max(l.CPUMillis*1024/1000, 2))
		res.CPU = &specs.LinuxCPU{Period: &p, Quota: &quota, Shares: &shares}
	}
	if l.MemoryBytes > 0 {
		limit, swap := l.MemoryBytes, l.MemoryBytes
		res.Memory = &specs.LinuxMemory{Limit: &limit, Swap: &swap}
	}
	if l.PIDs > 0 {
		pids := l.PIDs
		res.Pids = &specs.LinuxPids{Limit: &pids}
	}
	return res
}
