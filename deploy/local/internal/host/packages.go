package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Need is something that the machine must have: a program, or the files of one of several directories.
type Need struct {
	// Program is looked for in PATH.
	Program string
	// Dirs are the directories that may hold all of Files, in order of preference.
	Dirs, Files []string
	// Package is the name of the package that provides it, in Debian and its derivatives.
	Package string
	// Why says what it is needed for, in a few words.
	Why string
}

// CNIDirs are where distributions put the CNI plugins.
func CNIDirs() []string { return []string{"/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"} }

// Needs lists what the cluster needs from the machine's distribution.
func Needs() []Need {
	return []Need{
		{Program: "ip", Package: "iproute2", Why: "network namespace"},
		{Program: "nft", Package: "nftables", Why: "kube-proxy and egress"},
		{Program: "runc", Package: "runc", Why: "containers"},
		{Program: "busybox", Package: "busybox-static", Why: "pause and demo images"},
		{Program: "mmdebstrap", Package: "mmdebstrap", Why: "Python demo image"},
		{Dirs: CNIDirs(), Files: []string{"ptp", "host-local", "loopback", "portmap"}, Package: "containernetworking-plugins",
			Why: "Pod network"},
	}
}

// Find returns where the need is met; empty if it is not.
func (n Need) Find() string {
	if n.Program != "" {
		path, _ := exec.LookPath(n.Program)
		return path
	}
	for _, dir := range n.Dirs {
		missing := slices.ContainsFunc(n.Files, func(file string) bool {
			_, err := os.Stat(filepath.Join(dir, file))
			return err != nil
		})
		if !missing {
			return dir
		}
	}
	return ""
}

// Install installs the packages of the needs that are not met, and returns their names. It knows apt only; elsewhere
// the error names what to install.
func Install(ctx context.Context, needs []Need) ([]string, error) {
	var packages, missing []string
	for _, need := range needs {
		if need.Find() == "" {
			packages = append(packages, need.Package)
			missing = append(missing, need.Package+" ("+need.Why+")")
		}
	}
	if len(packages) == 0 {
		return nil, nil
	}
	if _, err := exec.LookPath("apt-get"); err != nil {
		return nil, fmt.Errorf("installing packages: this machine has no apt-get; install, by the names that Debian gives "+
			"them: %s", strings.Join(missing, ", "))
	}
	install := append([]string{"-o", "DPkg::Lock::Timeout=120", "install", "-y", "--no-install-recommends"}, packages...)
	if _, err := apt(ctx, install...); err != nil {
		// Most often the lists are stale or were never fetched.
		if _, err := apt(ctx, "update"); err != nil {
			return nil, err
		}
		if _, err := apt(ctx, install...); err != nil {
			return nil, err
		}
	}
	for _, need := range needs {
		if need.Find() == "" {
			return nil, fmt.Errorf("installing packages: package %s does not provide what is needed for: %s", need.Package, need.Why)
		}
	}
	return packages, nil
}

func apt(ctx context.Context, args ...string) (string, error) {
	return Run(ctx, "env", append([]string{"DEBIAN_FRONTEND=noninteractive", "apt-get"}, args...)...)
}

// Preflight checks what no package can provide, and returns every problem at once.
func Preflight(ctx context.Context) error {
	var problems []error
	if os.Geteuid() != 0 {
		problems = append(problems, errors.New("the cluster makes namespaces, mounts and cgroups: run this as root (sudo)"))
	}
	// A module that is not loaded yet is loaded; what then is still missing is missing from the kernel.
	_, _ = Run(ctx, "modprobe", "-a", "overlay", "veth", "nf_tables", "nf_conntrack")
	if filesystems, err := os.ReadFile("/proc/filesystems"); err != nil || !strings.Contains(string(filesystems), "\toverlay\n") {
		problems = append(problems, errors.New("the kernel has no overlay file system"))
	}
	for path, what := range map[string]string{
		"/proc/self/ns/net":                 "network namespaces",
		"/proc/self/ns/pid":                 "pid namespaces",
		"/proc/sys/net/netfilter":           "connection tracking",
		"/proc/sys/net/ipv4/ip_forward":     "IPv4 forwarding",
		"/proc/self/ns/cgroup":              "cgroup namespaces",
		"/proc/sys/user/max_mnt_namespaces": "mount namespaces",
	} {
		if _, err := os.Stat(path); err != nil {
			problems = append(problems, fmt.Errorf("the kernel has no %s", what))
		}
	}
	cgroups, err := FindCgroups()
	if err != nil || len(cgroups) == 0 {
		problems = append(problems, errors.New("no cgroup file system is mounted"))
	}
	if err := errors.Join(problems...); err != nil {
		return fmt.Errorf("checking this machine: %w", err)
	}
	return nil
}

// HasCapability reports whether this process effectively has a capability, by its number (capability.h).
func HasCapability(number uint) (bool, error) {
	raw, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return false, fmt.Errorf("reading the own capabilities: %w", err)
	}
	return hasCapability(string(raw), number)
}

func hasCapability(status string, number uint) (bool, error) {
	for line := range strings.Lines(status) {
		if value, ok := strings.CutPrefix(line, "CapEff:"); ok {
			var mask uint64
			if _, err := fmt.Sscanf(strings.TrimSpace(value), "%x", &mask); err != nil {
				return false, fmt.Errorf("reading the own capabilities: %w", err)
			}
			return mask&(1<<number) != 0, nil
		}
	}
	return false, errors.New("reading the own capabilities: no CapEff")
}
