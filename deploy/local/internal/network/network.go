// Package network owns the cluster's network namespace and its link to the machine.
//
//	machine                                    namespace fsb-local
//	fsb0 10.200.0.1/30  <---- veth pair ---->  eth0 10.200.0.2/30 (the node)
//	routes to Pods and Services by 10.200.0.2  default route by 10.200.0.1
//	nft table "fsb-local": egress masquerade   kube-proxy's nftables, CNI's veths, everything else
//
// So nothing of Kubernetes touches the machine's own rules, routes and bridges, and removing the namespace removes
// nearly all of it. Up and Down are idempotent and repair a partial state, but must not be called concurrently.
package network

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
)

// The addresses of the cluster. They are fixed, so that a kubeconfig, a certificate and a colleague's script agree.
const (
	Namespace    = "fsb-local"
	HostLink     = "fsb0"
	NodeLink     = "eth0"
	HostIP       = "10.200.0.1"
	NodeIP       = "10.200.0.2"
	LinkCIDR     = "10.200.0.0/30"
	PodCIDR      = "10.201.0.0/16"
	ServiceCIDR  = "10.202.0.0/16"
	APIServerIP  = "10.202.0.1" // the first address of ServiceCIDR, as Kubernetes takes it for the service "kubernetes"
	namespaceDir = "/run/netns"
	// NamespacePath is the file that holds the namespace.
	NamespacePath = namespaceDir + "/" + Namespace
	table         = "fsb-local"
	forwardFile   = "/proc/sys/net/ipv4/ip_forward"
)

// State is what Down must restore.
type State struct {
	// IPForward is the machine's ip_forward before Up; empty when Up did not change it.
	IPForward string `json:"ipForward,omitempty"`
}

// Up makes the namespace, the link, and the way out for Pods. State is kept in stateFile. What is missing but not vital
// (egress on a machine without a usable nft) goes to warn.
func Up(ctx context.Context, stateFile string, warn func(string)) error {
	if err := checkFree(ctx); err != nil {
		return err
	}
	if err := ensureNamespace(ctx); err != nil {
		return err
	}
	if err := ensureLink(ctx); err != nil {
		return err
	}
	if err := ensureNode(ctx); err != nil {
		return err
	}
	for _, route := range []string{PodCIDR, ServiceCIDR} {
		if _, err := host.Run(ctx, "ip", "route", "replace", route, "via", NodeIP, "dev", HostLink); err != nil {
			return err
		}
	}
	if err := ensureEgress(ctx, stateFile); err != nil {
		warn("Pods cannot reach networks outside this machine: " + err.Error())
	}
	if err := ensureDNS(ctx); err != nil {
		warn("containerd cannot resolve names, so it cannot pull images: " + err.Error())
	}
	return nil
}

// checkFree refuses to hide a network that the machine already uses.
func checkFree(ctx context.Context) error {
	out, err := host.Run(ctx, "ip", "-4", "-json", "route", "show", "table", "main")
	if err != nil {
		return err
	}
	return conflict([]byte(out))
}

// conflict finds a route of the machine, by `ip -json route`, that overlaps the cluster's networks.
func conflict(routes []byte) error {
	var list []struct{ Dst, Dev string }
	if len(bytes.TrimSpace(routes)) == 0 {
		return nil // a machine without any network
	}
	if err := json.Unmarshal(routes, &list); err != nil {
		return fmt.Errorf("reading the routes: %w", err)
	}
	for _, route := range list {
		if route.Dst == "default" || route.Dev == HostLink {
			continue
		}
		prefix, err := netip.ParsePrefix(route.Dst)
		if err != nil {
			addr, err := netip.ParseAddr(route.Dst)
			if err != nil {
				continue
			}
			prefix = netip.PrefixFrom(addr, addr.BitLen())
		}
		for _, own := range []string{LinkCIDR, PodCIDR, ServiceCIDR} {
			if prefix.Overlaps(netip.MustParsePrefix(own)) {
				return fmt.Errorf("network %s of the cluster overlaps the machine's route to %s by %s", own, route.Dst, route.Dev)
			}
		}
	}
	return nil
}

func ensureNamespace(ctx context.Context) error {
	if alive() {
		return nil
	}
	// A file without a namespace mounted on it is left when /run survived and the mount did not.
	if err := os.Remove(NamespacePath); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing a stale namespace file: %w", err)
	}
	_, err := host.Run(ctx, "ip", "netns", "add", Namespace)
	return err
}

// alive reports whether NamespacePath is a namespace.
func alive() bool {
	var stat unix.Statfs_t
	return unix.Statfs(NamespacePath, &stat) == nil && stat.Type == unix.NSFS_MAGIC
}

// ensureLink creates the veth pair. If only one end is as it should be, both are deleted first.
func ensureLink(ctx context.Context) error {
	_, hostErr := host.Run(ctx, "ip", "link", "show", "dev", HostLink)
	_, nodeErr := host.Run(ctx, "ip", "-n", Namespace, "link", "show", "dev", NodeLink)
	if hostErr != nil || nodeErr != nil {
		_, _ = host.Run(ctx, "ip", "link", "delete", "dev", HostLink)
		_, _ = host.Run(ctx, "ip", "-n", Namespace, "link", "delete", "dev", NodeLink)
		if _, err := host.Run(ctx, "ip", "link", "add", HostLink, "type", "veth",
			"peer", "name", NodeLink, "netns", Namespace); err != nil {
			return err
		}
	}
	_, err := host.Run(ctx, "ip", "address", "replace", HostIP+"/30", "dev", HostLink)
	if err == nil {
		_, err = host.Run(ctx, "ip", "link", "set", "dev", HostLink, "up")
	}
	return err
}

func ensureNode(ctx context.Context) error {
	for _, args := range [][]string{
		{"link", "set", "dev", "lo", "up"},
		{"address", "replace", NodeIP + "/30", "dev", NodeLink},
		{"link", "set", "dev", NodeLink, "up"},
		{"route", "replace", "default", "via", HostIP, "dev", NodeLink},
	} {
		if _, err := host.Run(ctx, "ip", append([]string{"-n", Namespace}, args...)...); err != nil {
			return err
		}
	}
	return Inside(func() error {
		if err := os.WriteFile(forwardFile, []byte("1"), 0o600); err != nil {
			return fmt.Errorf("enabling forwarding in the namespace: %w", err)
		}
		return nil
	})
}

// rules lets Pods out under the machine's own address. "add" and "flush" make it repeatable.
func rules() string {
	own := strings.Join([]string{LinkCIDR, PodCIDR}, ", ")
	return fmt.Sprintf(`add table ip %[1]s
flush table ip %[1]s
table ip %[1]s {
	chain postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		ip saddr { %[2]s } oifname != { "lo", "%[3]s" } masquerade
	}
}
`, table, own, HostLink)
}

func ensureEgress(ctx context.Context, stateFile string) error {
	before, err := os.ReadFile(forwardFile)
	if err != nil {
		return fmt.Errorf("reading ip_forward: %w", err)
	}
	if value := strings.TrimSpace(string(before)); value != "1" {
		raw, err := json.Marshal(State{IPForward: value})
		if err != nil {
			return fmt.Errorf("encoding the network state: %w", err)
		}
		if _, err := host.WriteFile(stateFile, raw, 0o600); err != nil {
			return err
		}
		if err := os.WriteFile(forwardFile, []byte("1"), 0o600); err != nil {
			return fmt.Errorf("enabling ip_forward: %w", err)
		}
	}
	_, err = host.RunInput(ctx, rules(), "nft", "-f", "-")
	return err
}

// Down removes the link, the namespace and the rules, and restores ip_forward. The processes inside must have exited, or
// the kernel keeps the namespace for them without a name.
func Down(ctx context.Context, stateFile string) error {
	var failed error
	try := func(absent, name string, args ...string) {
		_, err := host.Run(ctx, name, args...)
		if err != nil && !strings.Contains(err.Error(), absent) && !errors.Is(err, os.ErrNotExist) {
			failed = errors.Join(failed, err)
		}
	}
	try("Cannot find device", "ip", "link", "delete", "dev", HostLink)
	if alive() {
		try("No such file", "ip", "netns", "delete", Namespace)
	}
	if err := os.Remove(NamespacePath); err != nil && !errors.Is(err, fs.ErrNotExist) {
		failed = errors.Join(failed, fmt.Errorf("removing the namespace file: %w", err))
	}
	try("No such file", "nft", "delete", "table", "ip", table)
	var state State
	if raw, err := os.ReadFile(stateFile); err == nil && json.Unmarshal(raw, &state) == nil && state.IPForward != "" {
		if err := os.WriteFile(forwardFile, []byte(state.IPForward), 0o600); err != nil {
			failed = errors.Join(failed, fmt.Errorf("restoring ip_forward: %w", err))
		}
	}
	return failed
}
