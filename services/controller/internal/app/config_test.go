package app_test

import (
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/app"
)

func TestDefaultsNeedOnlyWhoAndWith(t *testing.T) {
	var c app.Config
	fs := pflag.NewFlagSet("t", pflag.ContinueOnError)
	c.AddFlags(fs)
	require.NoError(t, fs.Parse([]string{"--namespace=x", "--insecure"}))
	require.NoError(t, c.Validate())
	require.True(t, c.LeaderElect)
	require.Equal(t, "kubernetes:///allocator.fast-sandbox-system:9090", c.AllocatorAddress)
}

func TestEveryProblemNamesItsFlag(t *testing.T) {
	bad := map[string]string{
		"allocator-address": "", "agent-port": "0", "containerd-socket": "relative", "containerd-root": "/", "log-root": "/a/../b", "slot-root": "slots",
		"agent-ca-cert-file": "", "agent-ca-key-file": "", "agent-certificate-life": "1m", "namespace": "", "requeue-interval": "0s", "deletion-poll-interval": "-1s", "expiration-check-threshold": "0s",
		"lease-retry-period": "0s", "lease-renew-deadline": "0s", "lease-duration": "0s",
		"shrink-delay": "0s", "max-concurrent-reconciles": "0", "kube-api-qps": "0", "kube-api-burst": "-1",
	}
	var c app.Config
	fs := pflag.NewFlagSet("t", pflag.ContinueOnError)
	c.AddFlags(fs)
	for flag, value := range bad {
		require.NoError(t, fs.Set(flag, value))
	}
	err := c.Validate()
	for flag := range bad {
		require.ErrorContains(t, err, "--"+flag)
	}
	require.ErrorContains(t, err, "--tls-cert-file", "the shared flags are checked, too")
	for value, flag := range map[string]string{"cert-manager": "--agent-issuer", "other": "--agent-certificates"} {
		c.AgentCertificates = value
		require.ErrorContains(t, c.Validate(), flag)
		require.NotContains(t, c.Validate().Error(), "--agent-ca-cert-file")
	}
}
