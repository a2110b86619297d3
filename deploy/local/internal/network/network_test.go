package network_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/network"
)

func TestConflict(t *testing.T) {
	tests := map[string]struct {
		routes string
		want   string
	}{
		"no network":       {routes: "\n"},
		"no routes":        {routes: "[]"},
		"ordinary":         {routes: `[{"dst":"default","dev":"eth0"},{"dst":"192.0.2.0/24","dev":"eth0"},{"dst":"172.17.0.1","dev":"d0"}]`},
		"our own link":     {routes: `[{"dst":"10.200.0.0/30","dev":"fsb0"},{"dst":"10.201.0.0/16","dev":"fsb0"}]`},
		"a neighbor":       {routes: `[{"dst":"10.200.0.4/30","dev":"eth0"},{"dst":"10.203.0.0/16","dev":"eth0"}]`},
		"covers ours":      {routes: `[{"dst":"10.0.0.0/8","dev":"tun0"}]`, want: "tun0"},
		"inside of ours":   {routes: `[{"dst":"10.201.7.0/24","dev":"docker0"}]`, want: "docker0"},
		"one host of ours": {routes: `[{"dst":"10.202.0.1","dev":"wg0"}]`, want: "wg0"},
		"special route":    {routes: `[{"type":"unreachable","dst":"unreachable","dev":"lo"}]`},
		"no JSON":          {routes: "default via", want: "reading the routes"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := network.Conflict([]byte(test.routes))
			if test.want == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, test.want)
		})
	}
}

func TestLoopback(t *testing.T) {
	tests := map[string]struct {
		conf     string
		loopback bool
		upstream string
	}{
		"systemd-resolved": {conf: "# stub\nnameserver 127.0.0.53\noptions edns0\n", loopback: true},
		"dnsmasq on IPv6":  {conf: "nameserver ::1\n", loopback: true},
		"real server":      {conf: "search x\nnameserver 192.0.2.53\n", upstream: "192.0.2.53"},
		"both":             {conf: "nameserver 127.0.0.1\nnameserver 192.0.2.53\n", upstream: "192.0.2.53"},
		"none":             {conf: "search x\n"},
		"IPv6 first":       {conf: "nameserver 2001:db8::1\nnameserver 192.0.2.53\n", upstream: "192.0.2.53"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, test.loopback, network.Loopback(test.conf))
			server, ok := network.Upstream(test.conf)
			require.Equal(t, test.upstream != "", ok)
			if ok {
				require.Equal(t, test.upstream, server.String())
			}
		})
	}
}

func TestRules(t *testing.T) {
	rules := network.Rules()
	require.Contains(t, rules, "ip saddr { 10.200.0.0/30, 10.201.0.0/16 }")
	require.Contains(t, rules, "flush table ip fsb-local")
}
