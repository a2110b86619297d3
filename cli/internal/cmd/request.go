package cmd

import (
	"maps"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/apimachinery/pkg/api/resource"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// requestOptions are the flags of `run` that describe the sandbox.
type requestOptions struct {
	file, image, pool, workdir, network, policy, requestID string
	content                                                []byte // of file
	cpu, memory                                            string
	pids                                                   int64
	env, labels                                            []string
	ports                                                  []int32
	ttl, grace, finished                                   time.Duration
	strong, keepEntrypoint, keepAlive                      bool
}

func (o *requestOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringVarP(&o.file, "filename", "f", "", "`file` with a Sandbox manifest (YAML or JSON), - for standard input; flags override it")
	fs.StringVar(&o.image, "image", "", "container `image`")
	fs.StringVar(&o.pool, "pool", "", "`pool` whose agents may run it [$FSB_POOL] (default: the namespace's default pool)")
	fs.DurationVar(&o.ttl, "ttl", 0, "expire after this `duration`: the container is removed, the record is kept")
	fs.StringArrayVarP(&o.env, "env", "e", nil, "environment variable `NAME=VALUE`; may be repeated")
	fs.Int32SliceVarP(&o.ports, "port", "p", nil, "TCP `port` that the sandbox listens on; may be repeated")
	fs.StringArrayVarP(&o.labels, "label", "l", nil, "label `KEY=VALUE`; may be repeated")
	fs.StringVar(&o.cpu, "cpu", "", "CPU limit in `cores`: 500m, 2")
	fs.StringVar(&o.memory, "memory", "", "memory limit in `bytes`: 128Mi, 1Gi")
	fs.Int64Var(&o.pids, "pids", 0, "limit of processes and threads")
	fs.StringVarP(&o.workdir, "workdir", "w", "", "working `directory` in the sandbox")
	fs.StringVar(&o.network, "network", "", "`mode`: agent (the agent's network, the default) or none (loopback only)")
	fs.StringVar(&o.policy, "failure-policy", "", "`policy` for a lost agent: manual (the default) or auto-recreate")
	fs.DurationVar(&o.grace, "grace", 0, "`duration` between SIGTERM and SIGKILL when the sandbox ends (default 10s)")
	fs.DurationVar(&o.finished, "ttl-after-finished", 0, "delete the sandbox this `duration` after its process has ended (default: the pool's)")
	fs.BoolVar(&o.strong, "strong", false, "write the custom resource first (slower; the default writes it after the start)")
	fs.BoolVar(&o.keepEntrypoint, "keep-entrypoint", false, "pass what follows -- to the image's entry point as arguments")
	fs.BoolVar(&o.keepAlive, "keep-alive", false, "run no process but those of exec: the sandbox runs until it is deleted or expires")
	fs.StringVar(&o.requestID, "request-id", "", "`id` of the request: a repeated request with the same id creates no second sandbox (default: a new id)")
}

// addCompletion adds the completion of the flags.
func (o *requestOptions) addCompletion(c *cli, cmd *cobra.Command) {
	_ = cmd.RegisterFlagCompletionFunc("pool", c.completePools)
	for flag, values := range map[string][]string{"network": {"agent", "none"}, "failure-policy": policies()} {
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
}

// build returns the request. edited is a manifest from an editor; nil if there is none. Flags override the manifest of -f,
// which overrides the edited one.
func (o *requestOptions) build(c *cli, fs *pflag.FlagSet, name string, command []string, edited []byte) (*sandboxv1.CreateSandboxRequest, error) {
	in := &sandboxv1.CreateSandboxRequest{Namespace: c.settings.Namespace, Spec: &sandboxv1.SandboxSpec{}}
	var layers []manifest
	if edited != nil {
		layers = append(layers, manifest{"the edited manifest", edited})
	}
	if o.file != "" {
		layers = append(layers, manifest{"the manifest " + o.file, o.content})
	}
	if err := applyManifests(c, fs, in, layers); err != nil {
		return nil, err
	}
	if name != "" {
		in.Name = name
	}
	in.RequestId = o.requestID
	spec := in.GetSpec()
	if o.image != "" {
		spec.Image = o.image
	}
	if spec.GetImage() == "" {
		return nil, usagef("--image is required, or a manifest with an image")
	}
	if o.pool != "" {
		spec.Pool = o.pool
	} else if spec.GetPool() == "" {
		spec.Pool = c.settings.Pool // if that is empty, the server knows the default pool of the namespace
	}
	if len(command) > 0 && o.keepEntrypoint {
		spec.Args = command
	} else if len(command) > 0 {
		spec.Command, spec.Args = command, nil
	}
	if o.keepAlive {
		if len(command) > 0 {
			return nil, usagef("--keep-alive runs no command: use `fsb-ctl exec` when the sandbox runs")
		}
		spec.KeepAlive, spec.Command, spec.Args = true, nil, nil
	}
	if len(o.ports) > 0 {
		spec.Ports = o.ports
	}
	if o.workdir != "" {
		spec.WorkingDir = o.workdir
	}
	if o.strong {
		spec.ConsistencyMode = sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG
	}
	return in, o.refine(c, fs, in)
}

// refine sets the fields that need parsing.
func (o *requestOptions) refine(c *cli, fs *pflag.FlagSet, in *sandboxv1.CreateSandboxRequest) error {
	spec := in.GetSpec()
	var err error
	if spec.Env, err = overlay(spec.GetEnv(), o.env, "env"); err != nil {
		return err
	}
	if in.Labels, err = overlay(in.GetLabels(), o.labels, "label"); err != nil {
		return err
	}
	if fs.Changed("ttl") {
		if o.ttl <= 0 {
			return usagef("--ttl is %s, want more than 0", o.ttl)
		}
		spec.ExpireTime = timestamppb.New(c.Clock.Now().Add(o.ttl))
	}
	if fs.Changed("grace") {
		spec.TerminationGracePeriod = durationpb.New(o.grace)
	}
	if fs.Changed("ttl-after-finished") {
		spec.TtlAfterFinished = durationpb.New(o.finished)
	}
	switch o.network {
	case "":
	case "agent":
		spec.Network = sandboxv1.NetworkMode_NETWORK_MODE_AGENT
	case "none":
		spec.Network = sandboxv1.NetworkMode_NETWORK_MODE_NONE
	default:
		return usagef("--network is %q, want agent or none", o.network)
	}
	if o.policy != "" {
		if spec.FailurePolicy, err = parsePolicy(o.policy); err != nil {
			return err
		}
	}
	return o.limits(fs, spec)
}

func (o *requestOptions) limits(fs *pflag.FlagSet, spec *sandboxv1.SandboxSpec) error {
	limits := spec.GetResources()
	if limits == nil {
		limits = &sandboxv1.ResourceLimits{}
	}
	if o.cpu != "" {
		q, err := resource.ParseQuantity(o.cpu)
		if err != nil {
			return usagef("--cpu is %q: %w", o.cpu, err)
		}
		limits.CpuMillis = q.MilliValue()
	}
	if o.memory != "" {
		q, err := resource.ParseQuantity(o.memory)
		if err != nil {
			return usagef("--memory is %q: %w", o.memory, err)
		}
		limits.MemoryBytes = q.Value()
	}
	if fs.Changed("pids") {
		limits.Pids = o.pids
	}
	if o.cpu != "" || o.memory != "" || fs.Changed("pids") {
		spec.Resources = limits
	}
	return nil
}

// overlay returns the map with the KEY=VALUE pairs added.
func overlay(base map[string]string, pairs []string, flag string) (map[string]string, error) {
	if len(pairs) == 0 {
		return base, nil
	}
	out := maps.Clone(base)
	if out == nil {
		out = map[string]string{}
	}
	for _, pair := range pairs {
		key, value, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			return nil, usagef("--%s is %q, want KEY=VALUE", flag, pair)
		}
		out[key] = value
	}
	return out, nil
}

// policies are the values of --failure-policy.
func policies() []string { return []string{"manual", "auto-recreate"} }

func parsePolicy(s string) (sandboxv1.FailurePolicy, error) {
	switch strings.ToLower(strings.ReplaceAll(s, "-", "")) {
	case "manual":
		return sandboxv1.FailurePolicy_FAILURE_POLICY_MANUAL, nil
	case "autorecreate":
		return sandboxv1.FailurePolicy_FAILURE_POLICY_AUTO_RECREATE, nil
	default:
		return 0, usagef("--failure-policy is %q, want manual or auto-recreate", s)
	}
}
