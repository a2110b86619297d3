package plan_test

import (
	"encoding/json"
	"testing"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// valid returns the spec of a sandbox.
func valid() *specs.Spec {
	quota, period, shares, memory, pids := int64(50_000), uint64(100_000), uint64(512), int64(64<<20), int64(10)
	return &specs.Spec{
		Version: "1.0.2", Hostname: "box", Root: &specs.Root{Path: "rootfs"},
		Process: &specs.Process{
			Args: []string{"sleep"}, Cwd: "/", Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_CHOWN"}},
			Rlimits: []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 7, Hard: 8}},
		},
		Annotations: map[string]string{plan.RootAnnotation: "/slots/1", plan.PrivateAnnotation: "/logs/c/claim"},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"ro"}},
			{Destination: "/etc/hosts", Type: "bind", Source: "/pod/hosts", Options: []string{"rbind", "rprivate", "ro", "nosuid"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: "/kubepods/pod1/fsb-c", MaskedPaths: []string{"/proc/kcore"}, ReadonlyPaths: []string{"/proc/sys"},
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace},
				{Type: specs.NetworkNamespace, Path: "/run/netns/pod1"},
			},
			Resources: &specs.LinuxResources{
				Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}},
				CPU:     &specs.LinuxCPU{Quota: &quota, Period: &period, Shares: &shares}, Memory: &specs.LinuxMemory{Limit: &memory, Swap: &memory},
				Pids: &specs.LinuxPids{Limit: &pids},
			},
		},
	}
}

func parse(t *testing.T, s *specs.Spec) (*plan.Plan, error) {
	t.Helper()
	raw, err := json.Marshal(s)
	require.NoError(t, err)
	return plan.Parse(raw)
}

func TestPlan(t *testing.T) {
	p, err := parse(t, valid())
	require.NoError(t, err)
	require.False(t, p.Anchor)
	require.Equal(t, "/kubepods/pod1/fsb-c", p.Cgroup)
	require.Equal(t, "/run/netns/pod1", p.Network)
	require.False(t, p.OwnNetwork)
	require.Equal(t, "/slots/1", p.Root)
	require.Equal(t, []plan.Mount{
		{Source: "/logs/c/claim", Attributes: wire.NoSUID | wire.NoDev | wire.NoExec},
		{Type: plan.Devices, Options: "mode=755,size=65536k", Attributes: wire.NoSUID | unix.MOUNT_ATTR_STRICTATIME},
		{Source: "/pod/hosts", Attributes: wire.ReadOnly | wire.NoSUID},
		{Type: plan.Sysfs, Attributes: wire.ReadOnly},
	}, p.Mounts)
	require.Equal(t, []wire.SetupMount{
		{Destination: "/fsb", FD: 1},
		{Destination: "/proc", Type: "proc", Flags: unix.MS_NOSUID | unix.MS_NOEXEC | unix.MS_NODEV},
		{Destination: "/dev", FD: 2},
		{Destination: "/sys", FD: 4},
		{Destination: "/fsb-etc/hosts", FD: 3},
	}, p.Setup.Mounts)
	require.Equal(t, "box", p.Setup.Hostname)
	require.Equal(t, []wire.Rlimit{{Resource: unix.RLIMIT_NOFILE, Soft: 7, Hard: 8}}, p.Setup.Rlimits)
	require.EqualValues(t, 1<<unix.CAP_CHOWN|1<<unix.CAP_SYS_ADMIN|1<<unix.CAP_SETPCAP, p.Setup.Capabilities.Bounding)
	_, err = wire.EncodeSetup(&p.Setup)
	require.NoError(t, err)
}

func TestAnchor(t *testing.T) {
	p, err := parse(t, &specs.Spec{Annotations: map[string]string{plan.AnchorAnnotation: "true", plan.ShimCgroupAnnotation: "/pod1/shims"}})
	require.NoError(t, err)
	require.Equal(t, &plan.Plan{Anchor: true, ShimCgroup: "/pod1/shims"}, p)
}

func TestOwnNetwork(t *testing.T) {
	s := valid()
	s.Linux.Namespaces[4].Path = ""
	p, err := parse(t, s)
	require.NoError(t, err)
	require.True(t, p.OwnNetwork)
	require.True(t, p.Setup.Loopback)
	require.Contains(t, p.Setup.Mounts, wire.SetupMount{Destination: "/sys", Type: "sysfs", Flags: unix.MS_RDONLY}, "the host cannot make it before the namespace is there")
}

// withUsers gives a spec a user namespace.
func withUsers(s *specs.Spec, m ...specs.LinuxIDMapping) {
	s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
	s.Linux.UIDMappings, s.Linux.GIDMappings = m, m
}

func TestUserNamespace(t *testing.T) {
	s := valid()
	withUsers(s, specs.LinuxIDMapping{HostID: 1 << 28, Size: 65536})
	p, err := parse(t, s)
	require.NoError(t, err)
	require.EqualValues(t, 1<<28, p.FirstID)
	require.True(t, p.Setup.UserNamespace)
	p, err = parse(t, valid())
	require.NoError(t, err)
	require.Zero(t, p.FirstID)
	require.False(t, p.Setup.UserNamespace)
}

// TestUnsupported: what the runtime does not do is refused, and nothing is half applied.
func TestUnsupported(t *testing.T) {
	n, yes := int64(1), true
	for name, change := range map[string]func(*specs.Spec){
		"no process":              func(s *specs.Spec) { s.Process = nil },
		"no root":                 func(s *specs.Spec) { s.Root = nil },
		"no linux":                func(s *specs.Spec) { s.Linux = nil },
		"a terminal":              func(s *specs.Spec) { s.Process.Terminal = true },
		"hooks":                   func(s *specs.Spec) { s.Hooks = &specs.Hooks{} },
		"a domain name":           func(s *specs.Spec) { s.Domainname = "d" },
		"a label of SELinux":      func(s *specs.Spec) { s.Process.SelinuxLabel = "l" },
		"a mount label":           func(s *specs.Spec) { s.Linux.MountLabel = "l" },
		"a scheduler":             func(s *specs.Spec) { s.Process.Scheduler = &specs.Scheduler{} },
		"sysctls":                 func(s *specs.Spec) { s.Linux.Sysctl = map[string]string{"a": "b"} },
		"devices":                 func(s *specs.Spec) { s.Linux.Devices = []specs.LinuxDevice{{Path: "/dev/kvm"}} },
		"propagation":             func(s *specs.Spec) { s.Linux.RootfsPropagation = "shared" },
		"a personality":           func(s *specs.Spec) { s.Linux.Personality = &specs.LinuxPersonality{} },
		"id mappings":             func(s *specs.Spec) { s.Linux.UIDMappings = []specs.LinuxIDMapping{{Size: 1}} },
		"a namespace without ids": func(s *specs.Spec) { withUsers(s) },
		"few ids":                 func(s *specs.Spec) { withUsers(s, specs.LinuxIDMapping{HostID: 1 << 28, Size: 10}) },
		"the host's ids":          func(s *specs.Spec) { withUsers(s, specs.LinuxIDMapping{Size: 65536}) },
		"ids beyond the last":     func(s *specs.Spec) { withUsers(s, specs.LinuxIDMapping{HostID: 1<<32 - 2, Size: 65536}) },
		"ids from another one":    func(s *specs.Spec) { withUsers(s, specs.LinuxIDMapping{ContainerID: 1, HostID: 1 << 28, Size: 65536}) },
		"other ids of groups": func(s *specs.Spec) {
			withUsers(s, specs.LinuxIDMapping{HostID: 1 << 28, Size: 65536})
			s.Linux.GIDMappings = []specs.LinuxIDMapping{{HostID: 1 << 29, Size: 65536}}
		},
		"another's users": func(s *specs.Spec) {
			withUsers(s, specs.LinuxIDMapping{HostID: 1 << 28, Size: 65536})
			s.Linux.Namespaces[len(s.Linux.Namespaces)-1].Path = "/proc/1/ns/user"
		},
		"id mappings of a mount":  func(s *specs.Spec) { s.Mounts[0].GIDMappings = []specs.LinuxIDMapping{{Size: 1}} },
		"an unknown capability":   func(s *specs.Spec) { s.Process.Capabilities.Bounding = []string{"CAP_NONE"} },
		"an unknown limit":        func(s *specs.Spec) { s.Process.Rlimits[0].Type = "RLIMIT_NONE" },
		"no root of slots":        func(s *specs.Spec) { delete(s.Annotations, plan.RootAnnotation) },
		"a relative root":         func(s *specs.Spec) { s.Annotations[plan.RootAnnotation] = "slots" },
		"the host's PIDs":         func(s *specs.Spec) { s.Linux.Namespaces = s.Linux.Namespaces[1:] },
		"another's PIDs":          func(s *specs.Spec) { s.Linux.Namespaces[0].Path = "/proc/1/ns/pid" },
		"a time namespace":        func(s *specs.Spec) { s.Linux.Namespaces[0].Type = specs.TimeNamespace },
		"an unknown namespace":    func(s *specs.Spec) { s.Linux.Namespaces[0].Type = "moon" },
		"a relative mount point":  func(s *specs.Spec) { s.Mounts[0].Destination = "proc" },
		"a mount point with ..":   func(s *specs.Spec) { s.Mounts[0].Destination = "/proc/../x" },
		"an unknown mount":        func(s *specs.Spec) { s.Mounts[0].Type = "ext4" },
		"sysfs twice":             func(s *specs.Spec) { s.Mounts = append(s.Mounts, s.Mounts[2]) },
		"a bind elsewhere":        func(s *specs.Spec) { s.Mounts[3].Destination = "/etc/shadow" },
		"a relative source":       func(s *specs.Spec) { s.Mounts[3].Source = "hosts" },
		"no cgroup":               func(s *specs.Spec) { s.Linux.CgroupsPath = "" },
		"the root cgroup":         func(s *specs.Spec) { s.Linux.CgroupsPath = "/" },
		"a cgroup with ..":        func(s *specs.Spec) { s.Linux.CgroupsPath = "/kubepods/../x" },
		"a permitted device":      func(s *specs.Spec) { s.Linux.Resources.Devices[0].Allow = true },
		"two rules for devices":   func(s *specs.Spec) { r := s.Linux.Resources; r.Devices = append(r.Devices, r.Devices[0]) },
		"limits of block devices": func(s *specs.Spec) { s.Linux.Resources.BlockIO = &specs.LinuxBlockIO{} },
		"unified limits":          func(s *specs.Spec) { s.Linux.Resources.Unified = map[string]string{"a": "b"} },
		"a cpuset":                func(s *specs.Spec) { s.Linux.Resources.CPU.Cpus = "0" },
		"an idle cgroup":          func(s *specs.Spec) { s.Linux.Resources.CPU.Idle = &n },
		"a memory reservation":    func(s *specs.Spec) { s.Linux.Resources.Memory.Reservation = &n },
		"no OOM killer":           func(s *specs.Spec) { s.Linux.Resources.Memory.DisableOOMKiller = &yes },
	} {
		t.Run(name, func(t *testing.T) {
			s := valid()
			change(s)
			_, err := parse(t, s)
			require.True(t, errdefs.IsInvalidArgument(err), "%v", err)
		})
	}
	_, err := plan.Parse([]byte("{"))
	require.True(t, errdefs.IsInvalidArgument(err), "%v", err)
}

// FuzzParse parses whatever a record may have: a plan that it returns can be sent to sandbox-init.
func FuzzParse(f *testing.F) {
	raw, err := json.Marshal(valid())
	require.NoError(f, err)
	f.Add(raw)
	f.Add([]byte(`{"annotations":{"fast-sandbox.io/anchor":"true"}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		p, err := plan.Parse(raw)
		if err != nil || p.Anchor {
			return
		}
		require.Equal(t, byte('/'), p.Cgroup[0])
		for _, m := range p.Setup.Mounts {
			require.LessOrEqual(t, int(m.FD), len(p.Mounts))
		}
	})
}
