package cmd_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
)

func TestErrorsExitCodesAndHints(t *testing.T) {
	cases := map[string]struct {
		err  error
		code int
		line string
		hint string
	}{
		"not found":       {fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "sandbox default/web does not exist"), 3, "error: sandbox default/web does not exist (SANDBOX_NOT_FOUND)", "fsb-ctl list"},
		"pool not found":  {fault.New(errdefs.ErrNotFound, fault.PoolNotFound, "no pool p"), 3, "error: no pool p (POOL_NOT_FOUND)", "fsb-ctl pool list"},
		"image":           {fault.New(errdefs.ErrNotFound, fault.ImageNotFound, "no image"), 3, "(IMAGE_NOT_FOUND)", "check the reference"},
		"exists":          {fault.New(errdefs.ErrAlreadyExists, fault.SandboxExists, "taken"), 4, "(SANDBOX_EXISTS)", "omit NAME"},
		"invalid":         {fault.Field("spec.ports[0]", "it is 70000"), 5, "error: spec.ports[0]: it is 70000 (INVALID_FIELD)", ""},
		"precondition":    {fault.New(errdefs.ErrFailedPrecondition, fault.CommandNotFound, "no nope"), 5, "(COMMAND_NOT_FOUND)", "-- /bin/sh"},
		"terminating":     {fault.New(errdefs.ErrAborted, fault.SandboxTerminating, "going"), 5, "(SANDBOX_TERMINATING)", "being deleted"},
		"no capacity":     {fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full"), 6, "(NO_CAPACITY)", "poolMax"},
		"unknown outcome": {fault.Unsettled(fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full").With("sandbox", "default/web")), 6, "(NO_CAPACITY)", "fsb-ctl delete web -n default"},
		"overloaded":      {fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "busy"), 6, "(OVERLOADED)", "--timeout"},
		"over a quota":    {fault.New(errdefs.ErrResourceExhausted, fault.QuotaExceeded, "10 of 10 used"), 6, "(QUOTA_EXCEEDED)", "kubectl describe resourcequota"},
		"over a limit":    {fault.New(errdefs.ErrResourceExhausted, fault.CallerLimitExceeded, "too many"), 6, "(CALLER_LIMIT_EXCEEDED)", "--timeout"},
		"deadline":        {fault.New(context.DeadlineExceeded, fault.DeadlineExceeded, "late"), 8, "(DEADLINE_EXCEEDED)", "--timeout 5m"},
		"permission":      {fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied, "no"), 9, "(PERMISSION_DENIED)", "fsb-ctl auth can-i"},
		"internal":        {errors.New("secret"), 1, "error: internal error (INTERNAL)", "trace id"},
		"several lines":   {fault.Field("spec", "one\n two"), 5, "error: spec: one; two (INVALID_FIELD)", ""},
	}
	var current error
	b := start(t, &fake{get: func(context.Context, *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
		return nil, current
	}})
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			current = c.err
			r := b.run(t, "get", "web")
			require.Equal(t, c.code, r.code, r.err)
			lines := strings.Split(strings.TrimSpace(r.err), "\n")
			require.Contains(t, lines[0], c.line)
			require.Empty(t, r.out)
			if c.hint == "" {
				require.Len(t, lines, 1)
				return
			}
			require.Len(t, lines, 2)
			require.Regexp(t, "^hint: ", lines[1])
			require.Contains(t, lines[1], c.hint)
		})
	}
}

func TestUnavailableIsRetried(t *testing.T) {
	calls := 0
	b := start(t, &fake{get: func(context.Context, *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
		if calls++; calls < 3 {
			return nil, fault.New(errdefs.ErrUnavailable, fault.NotLeader, "not the leader").RetryIn(time.Millisecond)
		}
		return &sandboxv1.GetSandboxResponse{Sandbox: running("web")}, nil
	}})
	b.clock = clock.RealClock{}
	require.Zero(t, b.run(t, "get", "web").code)
	require.Equal(t, 3, calls)

	calls = -1 << 30
	r := b.run(t, "get", "web", "--timeout", "1s")
	require.Equal(t, 7, r.code)
	require.Contains(t, r.err, "error: not the leader (NOT_LEADER)", "the last error, not the deadline")
}

// TestDeadlineDuringAttempt has the deadline pass during an attempt. If that attempt was short, the error of the one before is
// reported; if it was long, the deadline is.
func TestDeadlineDuringAttempt(t *testing.T) {
	for name, tc := range map[string]struct {
		delay, took time.Duration // before the attempt that meets the deadline, and during it
		code        int
		want        string
	}{
		"short": {900 * time.Millisecond, 100 * time.Millisecond, 7, "error: not the leader (NOT_LEADER)"},
		"long":  {time.Millisecond, 999 * time.Millisecond, 8, "(DEADLINE_EXCEEDED)"},
	} {
		t.Run(name, func(t *testing.T) {
			c, calls := waitless{clocktesting.NewFakeClock(now)}, 0
			b := start(t, &fake{get: func(context.Context, *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
				if calls++; calls == 1 {
					return nil, fault.New(errdefs.ErrUnavailable, fault.NotLeader, "not the leader").RetryIn(tc.delay)
				}
				c.Step(tc.took)
				return nil, context.DeadlineExceeded
			}})
			b.clock = c
			r := b.run(t, "get", "web")
			require.Equal(t, tc.code, r.code, r.err)
			require.Contains(t, r.err, tc.want)
		})
	}
}

// waitless is a clock on which the time of a timer passes as soon as the timer is made.
type waitless struct{ *clocktesting.FakeClock }

func (w waitless) NewTimer(d time.Duration) clock.Timer {
	timer := w.FakeClock.NewTimer(d)
	w.Step(d)
	return timer
}

func TestConnectionErrors(t *testing.T) {
	b := start(t, mesh())
	b.clock = clock.RealClock{}
	t.Run("refused", func(t *testing.T) {
		r := b.run(t, "get", "web", "--addr", "127.0.0.1:1", "--timeout", "2s")
		require.Equal(t, 7, r.code)
		require.Regexp(t, `^error: connecting to 127.0.0.1:1: dial tcp 127.0.0.1:1: .*connection refused \(CONNECTION_FAILED\)\nhint: .*FSB_ADDR.*make -s env`, r.err)
	})
	t.Run("server certificate of another authority", func(t *testing.T) {
		other := pki.New(t).User(t, "alice")
		r := b.run(t, "get", "web", "--cacert", other.CAFile)
		require.Equal(t, 9, r.code, r.err)
		require.Contains(t, r.err, "(CERTIFICATE_NOT_ACCEPTED)")
		require.Contains(t, r.err, "hint: FSB_CACERT")
	})
	t.Run("client certificate of another authority", func(t *testing.T) {
		other := pki.New(t).User(t, "alice")
		r := b.run(t, "get", "web", "--cert", other.CertFile, "--key", other.KeyFile)
		require.Equal(t, 9, r.code, r.err)
		require.Contains(t, r.err, "(CERTIFICATE_NOT_ACCEPTED)")
	})
	t.Run("client certificate of another role", func(t *testing.T) {
		agent := b.authority.TLS(t, rpc.RoleAgent)
		r := b.run(t, "get", "web", "--cert", agent.ClientCertFile, "--key", agent.ClientKeyFile)
		require.Equal(t, 9, r.code, r.err)
		require.Contains(t, r.err, "(PERMISSION_DENIED)")
	})
	t.Run("no client certificate", func(t *testing.T) {
		c := *b
		c.env = map[string]string{"FSB_ADDR": b.addr}
		r := c.run(t, "get", "web")
		require.Equal(t, 2, r.code)
		require.Contains(t, r.err, "(NO_CERTIFICATE)")
		require.Contains(t, r.err, "make -s env")
	})
	t.Run("missing certificate file", func(t *testing.T) {
		r := b.run(t, "get", "web", "--cert", filepath.Join(t.TempDir(), "none"))
		require.Equal(t, 2, r.code)
		require.Contains(t, r.err, "no such file")
	})
	t.Run("plaintext to a TLS server", func(t *testing.T) {
		r := b.run(t, "get", "web", "--insecure", "--timeout", "2s")
		require.Equal(t, 7, r.code, r.err)
		require.Contains(t, r.err, "warning: plaintext")
	})
}

func TestInvalidUsage(t *testing.T) {
	manifest := filepath.Join(t.TempDir(), "sandbox.yaml")
	require.NoError(t, os.WriteFile(manifest, []byte("apiVersion: fast-sandbox.io/v1alpha1\nkind: Sandbox\nspec: {image: x, imagee: y}\n"), 0o600))
	b := start(t, &fake{}) // a call is an INTERNAL error with exit code 1
	for line, word := range map[string]string{
		"frob":                                   `unknown command "frob"`,
		"pool frob":                              `unknown command "frob"`,
		"get":                                    "NAME is missing",
		"get a b":                                `unexpected argument "b"`,
		"get a --frob":                           "unknown flag: --frob",
		"get a -o xml":                           `output is "xml"`,
		"get a --timeout 0s":                     "timeout is",
		"run":                                    "--image is required",
		"run a b --image x":                      "put -- before the command",
		"run --image x --env A":                  `--env is "A", want KEY=VALUE`,
		"run --image x --port http":              "invalid argument",
		"run --image x --network moon":           "--network is",
		"run --image x --memory lots":            "--memory is",
		"run --image x --cpu lots":               "--cpu is",
		"run --image x --ttl -1s":                "--ttl is",
		"run --image x --failure-policy hope":    "--failure-policy is",
		"run -f /nonexistent":                    "reading the manifest",
		"run -f " + manifest:                     `unknown field "imagee"`,
		"list --phase Happy":                     "--phase is",
		"logs a --tail -1":                       "--tail is",
		"trace":                                  "NAME is missing",
		"trace a --trace-id b":                   "mutually exclusive",
		"image frob":                             `unknown command "frob"`,
		"image pull":                             "IMAGE is missing",
		"run --edit -f -":                        "mutually exclusive",
		"logs a --since 0s":                      "--since is",
		"delete":                                 "is required",
		"delete a --all":                         "mutually exclusive",
		"update a":                               "nothing to change",
		"update a --ttl 1m --no-expire":          "mutually exclusive",
		"update a --expire tomorrow":             "--expire is",
		"update a --label =x":                    "want KEY=VALUE",
		"list --config /nonexistent/config.yaml": "reading configuration",
	} {
		t.Run(line, func(t *testing.T) {
			r := b.run(t, strings.Fields(line)...)
			require.Equal(t, 2, r.code, r.err)
			require.Contains(t, r.err, word)
			require.Regexp(t, `^error: [^\n]+\nhint: fsb-ctl.* --help\n$`, r.err)
			require.Empty(t, r.out)
		})
	}
}
