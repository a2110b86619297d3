package apparmor_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/apparmor"
)

// TestProfile checks the text for what it has to deny and must not permit. That the kernel enforces it was not seen: the machines of the tests
// have no AppArmor.
func TestProfile(t *testing.T) {
	text := apparmor.Text(true)
	name := apparmor.Name()
	require.Regexp(t, regexp.MustCompile(`^fast-sandbox-default-[0-9a-f]{8}$`), name)
	var lines []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	require.Equal(t, "abi <abi/3.0>,", lines[0])
	require.Equal(t, "profile "+name+" flags=(attach_disconnected,mediate_deleted) {", lines[1])
	require.Equal(t, "}", lines[len(lines)-1])
	rules := lines[2 : len(lines)-1]
	for _, rule := range []string{
		"deny mount,", "deny remount,", "deny umount,", "deny pivot_root,",
		"deny /proc/* w,", "deny /proc/{acpi,asound,bus,driver,fs,irq,scsi,sys,tty}/** wklx,", "deny /proc/sysrq-trigger rwklx,", "deny /proc/kcore rwklx,",
		"deny /sys/** wklx,", "deny /sys/firmware/** rwklx,", "deny /sys/kernel/security/** rwklx,", "deny /dev/{mem,kmem,port,kmsg} rwklx,",
	} {
		require.Contains(t, rules, rule)
	}
	permitted := map[string]bool{
		"network,": true, "file,": true, "signal (receive),": true, "signal (send) peer=" + name + ",": true,
		"ptrace (readby),": true, "ptrace (read, trace, tracedby) peer=" + name + ",": true,
	}
	for _, c := range apparmor.Capabilities() {
		permitted["capability "+c+","] = true
	}
	for _, rule := range rules {
		require.True(t, strings.HasSuffix(rule, ","), rule)
		require.True(t, strings.HasPrefix(rule, "deny ") || permitted[rule], "the rule %q permits something", rule)
	}
	for _, word := range []string{"PROFILE", "change_profile", "unconfined", "userns", "sys_admin", "sys_ptrace", "mac_admin"} {
		require.NotContains(t, text, word)
	}
	require.Equal(t, strings.TrimPrefix(text, "abi <abi/3.0>,\n"), apparmor.Text(false))
}
