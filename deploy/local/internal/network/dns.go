package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
)

const (
	// systemResolv is the machine's resolver configuration, upstreamResolv where systemd-resolved keeps the real servers
	// when that one only points to itself.
	systemResolv   = "/etc/resolv.conf"
	upstreamResolv = "/run/systemd/resolve/resolv.conf"
	dnsTable       = "fsb-local-dns"
)

// ResolvConf is the resolver configuration that Pods can use.
func ResolvConf() string {
	raw, err := os.ReadFile(systemResolv)
	if err != nil || !Loopback(string(raw)) {
		return systemResolv
	}
	if _, err := os.Stat(upstreamResolv); err != nil {
		return systemResolv
	}
	return upstreamResolv
}

// nameservers lists the IPv4 and IPv6 name servers of a resolv.conf.
func nameservers(resolvConf string) []netip.Addr {
	var servers []netip.Addr
	for line := range strings.Lines(resolvConf) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if addr, err := netip.ParseAddr(fields[1]); err == nil {
			servers = append(servers, addr)
		}
	}
	return servers
}

// Loopback reports whether every name server of a resolv.conf is on the machine's loopback (systemd-resolved, dnsmasq),
// where nothing in the namespace can reach it.
func Loopback(resolvConf string) bool {
	servers := nameservers(resolvConf)
	for _, server := range servers {
		if !server.IsLoopback() {
			return false
		}
	}
	return len(servers) > 0
}

// upstream is the first IPv4 name server that is not on the loopback.
func upstream(resolvConf string) (netip.Addr, bool) {
	for _, server := range nameservers(resolvConf) {
		if server.Is4() && !server.IsLoopback() {
			return server, true
		}
	}
	return netip.Addr{}, false
}

// ensureDNS makes the machine's resolver on the loopback work inside the namespace too, for containerd's pulls: queries to
// it go to the server that it would ask. Pods get that server by ResolvConf.
func ensureDNS(ctx context.Context) error {
	raw, err := os.ReadFile(systemResolv)
	if err != nil || !Loopback(string(raw)) {
		return nil //nolint:nilerr // a machine without a resolver has nothing to redirect
	}
	real, err := os.ReadFile(upstreamResolv)
	if err != nil {
		return fmt.Errorf("finding the server behind the resolver on the loopback: %w", err)
	}
	server, ok := upstream(string(real))
	if !ok {
		return errors.New("finding the server behind the resolver on the loopback: none in " + upstreamResolv)
	}
	return redirectDNS(ctx, server)
}

func redirectDNS(ctx context.Context, server netip.Addr) error {
	rules := fmt.Sprintf(`add table ip %[1]s
flush table ip %[1]s
table ip %[1]s {
	chain output {
		type nat hook output priority -100; policy accept;
		ip daddr 127.0.0.0/8 udp dport 53 dnat to %[2]s
		ip daddr 127.0.0.0/8 tcp dport 53 dnat to %[2]s
	}
	chain postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		ip saddr 127.0.0.0/8 oifname "%[3]s" snat to %[4]s
	}
}
`, dnsTable, server, NodeLink, NodeIP)
	return Inside(func() error {
		// Without it the kernel drops what leaves with a loopback address, before its source is rewritten.
		if err := os.WriteFile("/proc/sys/net/ipv4/conf/"+NodeLink+"/route_localnet", []byte("1"), 0o600); err != nil {
			return fmt.Errorf("allowing loopback addresses on the link: %w", err)
		}
		_, err := host.RunInput(ctx, rules, "nft", "-f", "-")
		return err
	})
}
