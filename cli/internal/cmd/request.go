package cmd

import (
	"fmt"
	"io"
	"maps"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/yaml"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// requestOptions are the flags of `run` that say what to run.
type requestOptions struct {
	file, image, pool, workdir, network, policy, requestID string
	cpu, memory                                            string
	pids                                                   int64
	env, labels                                            []string
	ports                                                  []int32
	ttl, grace                                             time.Duration
	strong, keepEntrypoint                                 bool
}

func (o *requestOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringVarP(&o.file, "filename", "f", "", "Sandbox manifest (YAML or JSON) to start from, - for standard input; flags are laid over it: `file`")
	fs.StringVar(&o.image, "image", "", "container `image`")
	fs.StringVar(&o.pool, "pool", "", "`pool` whose agents may run it [$FSB_POOL] (default \"default\")")
	fs.DurationVar(&o.ttl, "ttl", 0, "expire after this `time`: the container is removed, the record kept")
	fs.StringArrayVarP(&o.env, "env", "e", nil, "variable of the environment, `NAME=VALUE`; may be repeated")
	fs.Int32SliceVarP(&o.ports, "port", "p", nil, "TCP `port` that it listens on; may be repeated")
	fs.StringArrayVarP(&o.labels, "label", "l", nil, "label, `KEY=VALUE`; may be repeated")
	fs.StringVar(&o.cpu, "cpu", "", "limit of CPU, in `cores`: 500m, 2")
	fs.StringVar(&o.memory, "memory", "", "limit of memory, in `bytes`: 128Mi, 1Gi")
	fs.Int64Var(&o.pids, "pids", 0, "limit of processes and threads")
	fs.StringVarP(&o.workdir, "workdir", "w", "", "working `directory` inside the image")
	fs.StringVar(&o.network, "network", "", "agent (share the agent's network, the default) or none (loopback only): `mode`")
	fs.StringVar(&o.policy, "failure-policy", "", "when its agent is lost: manual (the default) or auto-recreate: `policy`")
	fs.DurationVar(&o.grace, "grace", 0, "`time` between SIGTERM and SIGKILL when it ends (default 10s)")
	fs.BoolVar(&o.strong, "strong", false, "write the custom resource first (slower; the default writes it behind)")
	fs.BoolVar(&o.keepEntrypoint, "keep-entrypoint", false, "hand what follows -- to the image's entry point, as arguments")
	fs.StringVar(&o.requestID, "request-id", "", "`id` under which the request can be repeated without making a second sandbox (default: a new one)")
}

// build makes the request: the manifest, if there is one, and over it what the flags say.
func (o *requestOptions) build(c *cli, fs *pflag.FlagSet, name string, command []string) (*sandboxv1.CreateSandboxRequest, error) {
	in := &sandboxv1.CreateSandboxRequest{Namespace: c.settings.Namespace, Spec: &sandboxv1.SandboxSpec{}}
	if o.file != "" {
		if err := o.manifest(c, fs, in); err != nil {
			return nil, err
		}
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
		return nil, usagef("--image is required, or a manifest that has one")
	}
	if o.pool != "" {
		spec.Pool = o.pool
	} else if spec.GetPool() == "" {
		spec.Pool = c.settings.Pool
	}
	if len(command) > 0 && o.keepEntrypoint {
		spec.Args = command
	} else if len(command) > 0 {
		spec.Command, spec.Args = command, nil
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

// refine sets what has to be parsed.
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

// manifest reads a Sandbox manifest strictly: a field that is unknown or given twice is an error.
func (o *requestOptions) manifest(c *cli, fs *pflag.FlagSet, in *sandboxv1.CreateSandboxRequest) error {
	var raw []byte
	var err error
	if o.file == "-" {
		raw, err = io.ReadAll(c.In)
	} else {
		raw, err = os.ReadFile(o.file)
	}
	if err != nil {
		return usageError{fmt.Errorf("reading the manifest: %w", err)}
	}
	var cr v1alpha1.Sandbox
	if err := yaml.UnmarshalStrict(raw, &cr); err != nil {
		return usageError{fmt.Errorf("reading the manifest %s: %w", o.file, err)}
	}
	if want := v1alpha1.GroupVersion.String(); cr.APIVersion != want || cr.Kind != "Sandbox" {
		return usagef("the manifest %s is of %s %s, want %s Sandbox", o.file, cr.APIVersion, cr.Kind, want)
	}
	if cr.Namespace != "" && fs.Changed("namespace") && cr.Namespace != c.settings.Namespace {
		return usagef("the manifest's namespace is %s and --namespace is %s", cr.Namespace, c.settings.Namespace)
	}
	if cr.Namespace != "" {
		in.Namespace = cr.Namespace
	}
	in.Name, in.Labels, in.Spec = cr.Name, maps.Clone(cr.Labels), convert.SpecToProto(&cr.Spec)
	return nil
}

// overlay lays KEY=VALUE pairs over a map.
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
