package plan

// Support is what becomes of an option of an OCI spec.
type Support string

// What becomes of options.
const (
	// Parts is an option that is a struct or a list of them: its fields have rows of their own.
	Parts Support = "parts"
	// Shim is an option that the shim and sandbox-init apply before the claim.
	Shim Support = "applied"
	// Claim is an option that the agent passes to sandbox-init with the claim. The shim does not look at it.
	Claim Support = "by the claim"
	// Refused is an option with which a spec is refused.
	Refused Support = "refused"
	// Meaningless is an option that says nothing to a runtime.
	Meaningless Support = "no effect"
)

// Option is an option of an OCI spec.
type Option struct {
	// Field is its path in JSON; [] stands for each element of a list.
	Field   string
	Support Support
	// Note says what of it is supported.
	Note string
}

// Options returns the options of the OCI spec, in the order of the documentation. Every option of the version of the spec that this package
// is compiled with is there.
func Options() []Option {
	list := []Option{
		{"ociVersion", Meaningless, ""},
		{"annotations", Shim, "those of Fast Sandbox; others have no effect"},
		{"hostname", Shim, "of the slot; that of the sandbox comes with the claim"},
		{"root", Parts, ""},
		{"root.path", Meaningless, "the root of slots is named by an annotation, and that of the sandbox comes with the claim"},
		{"root.readonly", Meaningless, "the root of slots is always read-only, and that of a sandbox never"},
	}
	list = append(list, processOptions()...)
	list = append(list, mountOptions()...)
	list = append(list, linuxOptions()...)
	list = append(list, resourceOptions()...)
	return append(list, refused("domainname", "hooks", "solaris", "windows", "vm", "zos", "freebsd")...)
}

func processOptions() []Option {
	list := []Option{
		{"process", Parts, "required"},
		{"process.args", Claim, ""}, {"process.env", Claim, ""}, {"process.cwd", Claim, ""},
		{"process.user", Parts, ""},
		{"process.user.uid", Claim, ""}, {"process.user.gid", Claim, ""}, {"process.user.umask", Claim, ""}, {"process.user.additionalGids", Claim, ""},
		{"process.capabilities", Parts, "unknown names are refused"},
		{"process.capabilities.bounding", Shim, "with SYS_ADMIN and SETPCAP until the claim"},
		{"process.capabilities.effective", Claim, ""}, {"process.capabilities.permitted", Claim, ""},
		{"process.capabilities.inheritable", Claim, ""}, {"process.capabilities.ambient", Claim, ""},
		{"process.rlimits", Shim, "unknown names are refused"},
		{"process.noNewPrivileges", Claim, ""},
		{"process.apparmorProfile", Claim, ""},
		{"process.oomScoreAdj", Shim, ""},
	}
	return append(list, refused("process.terminal", "process.consoleSize", "process.commandLine", "process.user.username",
		"process.scheduler", "process.ioPriority", "process.execCPUAffinity", "process.selinuxLabel")...)
}

func mountOptions() []Option {
	return []Option{
		{"mounts[]", Parts, ""},
		{"mounts[].destination", Shim, "absolute and clean; a bind mount only at `/etc/hosts`, `/etc/hostname`, `/etc/resolv.conf`, and in the directories of a slot"},
		{"mounts[].type", Shim, "`proc`, `tmpfs`, `devpts`, `mqueue`, `sysfs`, `cgroup` (which is cgroup2), `bind`; others are refused"},
		{"mounts[].source", Shim, "of a bind mount, absolute"},
		{"mounts[].options", Shim, "`nosuid`, `nodev`, `noexec`, `ro`, `rw`; of a bind mount also `bind`, `rbind`, `private`, `rprivate`, and others are refused; " +
			"of another mount also `strictatime`, `relatime`, and others are passed to the kernel as they are"},
		{"mounts[].uidMappings", Refused, ""},
		{"mounts[].gidMappings", Refused, ""},
	}
}

func linuxOptions() []Option {
	list := []Option{
		{"linux", Parts, "required"},
		{"linux.cgroupsPath", Shim, "required; a path, or SLICE:PREFIX:NAME"},
		{"linux.namespaces[]", Parts, ""},
		{"linux.namespaces[].type", Shim, "`pid`, `mount`, `ipc` and `uts` are required; `user`, `network` and `cgroup` may be there; others are refused"},
		{"linux.namespaces[].path", Shim, "of `network` only"},
		{"linux.uidMappings", Shim, "one range of 65,536 ids from 0 on, with a user namespace; not of ids below 65,536"},
		{"linux.gidMappings", Shim, "the same as for users"},
		{"linux.maskedPaths", Shim, ""},
		{"linux.readonlyPaths", Shim, ""},
		{"linux.seccomp", Claim, "native system calls only"},
		{"linux.resources", Parts, ""},
	}
	return append(list, refused("linux.sysctl", "linux.devices", "linux.netDevices", "linux.rootfsPropagation",
		"linux.mountLabel", "linux.intelRdt", "linux.memoryPolicy", "linux.personality", "linux.timeOffsets")...)
}

func resourceOptions() []Option {
	list := []Option{
		{"linux.resources.devices", Shim, "one rule, which denies all; the devices of every container stay permitted"},
		{"linux.resources.cpu", Parts, ""},
		{"linux.resources.cpu.shares", Shim, ""}, {"linux.resources.cpu.quota", Shim, ""}, {"linux.resources.cpu.period", Shim, ""},
		{"linux.resources.memory", Parts, ""},
		{"linux.resources.memory.limit", Shim, ""}, {"linux.resources.memory.swap", Shim, ""},
		{"linux.resources.pids", Shim, ""},
	}
	list = append(list, refused("linux.resources.cpu.burst", "linux.resources.cpu.realtimeRuntime", "linux.resources.cpu.realtimePeriod",
		"linux.resources.cpu.cpus", "linux.resources.cpu.mems", "linux.resources.cpu.idle")...)
	list = append(list, refused("linux.resources.memory.reservation", "linux.resources.memory.kernel", "linux.resources.memory.kernelTCP",
		"linux.resources.memory.swappiness", "linux.resources.memory.disableOOMKiller", "linux.resources.memory.useHierarchy",
		"linux.resources.memory.checkBeforeUpdate")...)
	return append(list, refused("linux.resources.blockIO", "linux.resources.hugepageLimits", "linux.resources.network", "linux.resources.rdma",
		"linux.resources.unified")...)
}

func refused(fields ...string) []Option {
	list := make([]Option, 0, len(fields))
	for _, f := range fields {
		list = append(list, Option{Field: f, Support: Refused})
	}
	return list
}
