package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPick(t *testing.T) {
	tests := map[string]struct {
		argv     []string
		upstream bool
		args     []string
	}{
		"nothing at all":          {argv: nil},
		"our own, bare":           {argv: []string{"fsb-local"}},
		"our own command":         {argv: []string{"/bin/fsb-local", "up"}},
		"by link":                 {argv: []string{"bin/k8s/etcd", "--version"}, upstream: true, args: []string{"bin/k8s/etcd", "--version"}},
		"by link, as our command": {argv: []string{"kubectl", "kubelet"}, upstream: true, args: []string{"kubectl", "kubelet"}},
		"by first argument":       {argv: []string{"fsb-local", "kubectl", "get", "pods"}, upstream: true, args: []string{"kubectl", "get", "pods"}},
		"as a later argument":     {argv: []string{"fsb-local", "logs", "kubelet"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			run, args := pick(test.argv)
			require.Equal(t, test.upstream, run != nil)
			require.Equal(t, test.args, args)
		})
	}
}
