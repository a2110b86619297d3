package apparmor

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// baseName is the profile's name without its version.
const baseName = "fast-sandbox-default"

// namePlaceholder stands for the profile's name in rules.
const namePlaceholder = "PROFILE"

// Name returns the name of the profile: it ends in a hash of its rules, so that a version is never replaced below the sandboxes that run
// in it, and versions are loaded side by side.
func Name() string {
	sum := sha256.Sum256([]byte(body()))
	return baseName + "-" + hex.EncodeToString(sum[:4])
}

// Capabilities returns those that the profile permits, as it names them: all that any pool can give to a sandbox. Which of them a sandbox
// has is decided by its bounding set.
func Capabilities() []string {
	return []string{
		"chown", "dac_override", "fsetid", "fowner", "setgid", "setuid", "setfcap", "setpcap", "net_bind_service", "sys_chroot", "kill",
		"net_raw", "mknod", "audit_write",
	}
}

// Text returns the profile. Its rules stay as they are with later versions of AppArmor's language if the host has the definition of
// version 3.0, which abi says.
func Text(abi bool) string {
	var b strings.Builder
	if abi {
		b.WriteString("abi <abi/3.0>,\n")
	}
	b.WriteString("profile " + Name() + " flags=(attach_disconnected,mediate_deleted) {\n")
	b.WriteString(strings.ReplaceAll(body(), namePlaceholder, Name()))
	b.WriteString("}\n")
	return b.String()
}

func body() string {
	var b strings.Builder
	for _, c := range Capabilities() {
		b.WriteString("  capability " + c + ",\n")
	}
	return b.String() + rules
}

// rules are the profile without its head and its capabilities. They permit what a sandbox is to do, and repeat what its mounts, its seccomp
// filter and its namespaces prevent already: a mistake in one of those is then not an escape.
const rules = `
  network,
  file,

  # Components of the node, whatever profile they have, end and look at processes of a sandbox. Its processes reach only each other.
  signal (receive),
  signal (send) peer=PROFILE,
  ptrace (readby),
  ptrace (read, trace, tracedby) peer=PROFILE,

  # A sandbox never mounts.
  deny mount,
  deny remount,
  deny umount,
  deny pivot_root,

  # Of /proc, only what belongs to a process is written.
  deny /proc/* w,
  deny /proc/{acpi,asound,bus,driver,fs,irq,scsi,sys,tty}/** wklx,
  deny /proc/sysrq-trigger rwklx,
  deny /proc/kcore rwklx,
  deny /proc/kmsg rwklx,

  # Of /sys nothing is written, and what describes the machine or its security is not read. Cgroups are mounted read-only.
  deny /sys/** wklx,
  deny /sys/firmware/** rwklx,
  deny /sys/kernel/security/** rwklx,
  deny /sys/kernel/debug/** rwklx,
  deny /sys/kernel/tracing/** rwklx,
  deny /sys/devices/virtual/powercap/** rwklx,

  # Memory and ports of the machine.
  deny /dev/{mem,kmem,port,kmsg} rwklx,
`
