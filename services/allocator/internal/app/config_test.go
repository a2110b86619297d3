package app_test

import (
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/app"
)

func TestElectionFlags(t *testing.T) {
	good := []string{"--insecure", "--namespace=ns", "--pod-name=a", "--pod-ip=10.0.0.1"}
	tests := map[string]struct {
		args []string
		want string
	}{
		"in a Pod":                {good, ""},
		"with an address":         {[]string{"--insecure", "--namespace=ns", "--advertise-address=a.example:1"}, ""},
		"alone":                   {[]string{"--insecure", "--leader-elect=false"}, ""},
		"without a namespace":     {[]string{"--insecure", "--pod-ip=10.0.0.1"}, "--namespace"},
		"without an address":      {[]string{"--insecure", "--namespace=ns"}, "--advertise-address"},
		"an address without port": {append(good[:3:3], "--advertise-address=10.0.0.1"), "--advertise-address"},
		"a short lease":           {append(good[:4:4], "--lease-duration=100ms"), "--lease-duration"},
		"a late deadline":         {append(good[:4:4], "--lease-renew-deadline=5s"), "--lease-renew-deadline"},
		"heartbeats on time":      {append(good[:4:4], "--heartbeat-timeout=2m"), ""},
		"a short heartbeat":       {append(good[:4:4], "--heartbeat-timeout=1s"), "--heartbeat-timeout"},
		"a slow retry":            {append(good[:4:4], "--lease-retry-period=4s"), "--lease-retry-period"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			cfg := app.NewConfig()
			fs := pflag.NewFlagSet("allocator", pflag.ContinueOnError)
			cfg.AddFlags(fs)
			require.NoError(t, fs.Parse(test.args))
			err := cfg.Validate()
			if test.want == "" {
				require.NoError(t, err)
				require.Equal(t, 5*time.Second, cfg.Lease.LeaseDuration)
				return
			}
			require.ErrorContains(t, err, test.want)
		})
	}
}
