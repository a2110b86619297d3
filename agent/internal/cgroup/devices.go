package cgroup

import (
	"fmt"
	"os"
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// rule permits access to devices. A number below 0 is any.
type rule struct {
	kind         string
	major, minor int64
	access       string
}

// devices are what OCI runtimes permit every container: to make any node, and to open null, zero, full, random, urandom, tty, pseudoterminals
// and ptmx.
func devices() []rule {
	return []rule{
		{"c", -1, -1, "m"}, {"b", -1, -1, "m"}, {"c", 1, 3, "rwm"}, {"c", 1, 5, "rwm"}, {"c", 1, 7, "rwm"}, {"c", 1, 8, "rwm"}, {"c", 1, 9, "rwm"},
		{"c", 5, 0, "rwm"}, {"c", 5, 2, "rwm"}, {"c", 136, -1, "rwm"},
	}
}

// limitDevices gives a cgroup of the legacy hierarchy the rules, and no others.
func (t *Tree) limitDevices(path string) error {
	dir := filepath.Join(t.root, "devices", path)
	if _, err := os.Stat(dir); err != nil {
		return nil //nolint:nilerr // the kernel has no such controller
	}
	if err := write(filepath.Join(dir, "devices.deny"), "a"); err != nil {
		return err
	}
	number := func(n int64) string {
		if n < 0 {
			return "*"
		}
		return fmt.Sprint(n)
	}
	var allowed []string
	for _, r := range devices() {
		allowed = append(allowed, r.kind+" "+number(r.major)+":"+number(r.minor)+" "+r.access)
	}
	return write(filepath.Join(dir, "devices.allow"), allowed...)
}

// devices2 returns the rules for the unified hierarchy: the first denies all others.
func devices2() []specs.LinuxDeviceCgroup {
	out := []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}
	for _, r := range devices() {
		out = append(out, specs.LinuxDeviceCgroup{Allow: true, Type: r.kind, Major: &r.major, Minor: &r.minor, Access: r.access})
	}
	return out
}
