package app_test

import (
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/app"
)

// parsed returns the configuration that the flags make.
func parsed(t *testing.T, args ...string) *app.Config {
	t.Helper()
	cfg := &app.Config{}
	fs := pflag.NewFlagSet("gc", pflag.ContinueOnError)
	cfg.AddFlags(fs)
	require.NoError(t, fs.Parse(append([]string{"--insecure"}, args...)))
	return cfg
}

func TestDefaultsObserve(t *testing.T) {
	cfg := parsed(t)
	require.NoError(t, cfg.Validate())
	require.Equal(t, app.ModeObserve, cfg.Mode)
}

func TestValidateNamesEveryProblem(t *testing.T) {
	for name, test := range map[string]struct {
		args []string
		want []string
	}{
		"enforce needs a namespace": {[]string{"--mode=enforce"}, []string{"--namespace"}},
		"several": {[]string{"--mode=sometimes", "--scope=all,apps", "--max-delete-share=0", "--concurrent-gc-syncs=0", "--pod-gc-period=0s", "--max-delete-window=1ms"},
			[]string{"--mode", "--scope", "--max-delete-share", "--concurrent-gc-syncs", "--pod-gc-period", "--max-delete-window"}},
		"no scope": {[]string{"--scope="}, []string{"--scope"}},
		"less": {[]string{"--terminated-pod-gc-threshold=-1", "--max-delete-floor=-1", "--rival-check=-1s", "--rival-check-period=-1s"},
			[]string{"--terminated-pod-gc-threshold", "--max-delete-floor", "--rival-check ", "--rival-check-period"}},
		"requests":  {[]string{"--kube-api-qps=10", "--kube-api-burst=5"}, []string{"--kube-api-burst"}},
		"no limit":  {[]string{"--kube-api-qps=-1"}, []string{"--kube-api-qps"}},
		"the Lease": {[]string{"--lease-duration=1ms"}, []string{"--lease-duration"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := parsed(t, test.args...).Validate()
			for _, want := range test.want {
				require.ErrorContains(t, err, want)
			}
		})
	}
	require.NoError(t, parsed(t, "--mode=enforce", "--namespace=ns", "--scope=core,fast-sandbox.io").Validate())
}

// TestObserverIgnoresSecrets: its account has no right to read them. A collector that enforces deletes Secrets too.
func TestObserverIgnoresSecrets(t *testing.T) {
	events, others, secrets := schema.GroupResource{Resource: "events"}, schema.GroupResource{Group: "events.k8s.io", Resource: "events"}, schema.GroupResource{Resource: "secrets"}
	for name, test := range map[string]struct {
		args []string
		want []schema.GroupResource
	}{
		"observe":     {nil, []schema.GroupResource{events, others, secrets}},
		"enforce":     {[]string{"--mode=enforce"}, []schema.GroupResource{events, others}},
		"a selection": {[]string{"--ignored-resources=leases.coordination.k8s.io"}, []schema.GroupResource{{Group: "coordination.k8s.io", Resource: "leases"}}},
		"nothing":     {[]string{"--ignored-resources="}, nil},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, test.want, parsed(t, test.args...).IgnoredResources()) })
	}
}
