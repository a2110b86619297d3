package cmd

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

type updateOptions struct {
	ttl, recovery   time.Duration
	expire, policy  string
	noExpire, reset bool
	labels          []string
}

func newUpdate(c *cli) *cobra.Command {
	o := &updateOptions{}
	cmd := &cobra.Command{
		Use:   "update NAME [flags]",
		Short: "Change a sandbox",
		Long:  "Change what can be changed of a sandbox. Image, command, ports and pool cannot: a container stays what it is.",
		Example: `  # ten minutes more from now
  fsb-ctl update web --ttl 10m

  # never mind
  fsb-ctl update web --no-expire

  # a new container, on whatever agent has room
  fsb-ctl update web --reset

  # set one label and take another away
  fsb-ctl update web --label team=red --label old-`,
		Args:              exactly("NAME"),
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			return updateSandbox(cmd.Context(), c, o, cmd.Flags(), args[0])
		},
	}
	fs := cmd.Flags()
	fs.DurationVar(&o.ttl, "ttl", 0, "expire after this `time` from now")
	fs.StringVar(&o.expire, "expire", "", "expire at this `time` (RFC 3339): 2030-01-02T15:04:05Z")
	fs.BoolVar(&o.noExpire, "no-expire", false, "never expire")
	fs.BoolVar(&o.reset, "reset", false, "replace the container by a new one")
	fs.StringVar(&o.policy, "failure-policy", "", "when its agent is lost: manual or auto-recreate: `policy`")
	fs.DurationVar(&o.recovery, "recovery-timeout", 0, "how long auto-recreate waits for a lost agent: `time`")
	fs.StringArrayVarP(&o.labels, "label", "l", nil, "`KEY=VALUE` sets a label, KEY- takes it away; may be repeated")
	return cmd
}

func updateSandbox(ctx context.Context, c *cli, o *updateOptions, fs *pflag.FlagSet, name string) error {
	in := &sandboxv1.UpdateSandboxRequest{
		Sandbox:    &sandboxv1.Sandbox{Namespace: c.settings.Namespace, Name: name, Spec: &sandboxv1.SandboxSpec{}},
		UpdateMask: &fieldmaskpb.FieldMask{}, RequestId: uuid.NewString(),
	}
	if err := o.fill(c, fs, in); err != nil {
		return err
	}
	if o.reset || len(o.labels) > 0 {
		if err := buildUpdate(ctx, c, o, in); err != nil {
			return err
		}
	}
	if len(in.GetUpdateMask().GetPaths()) == 0 {
		return usagef("nothing to change: --ttl, --expire, --no-expire, --reset, --failure-policy, --recovery-timeout or --label is required")
	}
	client, err := c.sandboxes()
	if err != nil {
		return err
	}
	out, err := call(ctx, c, "updating "+name, func(ctx context.Context) (*sandboxv1.UpdateSandboxResponse, error) {
		return client.UpdateSandbox(ctx, in)
	})
	if err != nil {
		return err
	}
	return c.printSandbox(out.GetSandbox())
}

// fill sets the fields of the spec and names them in the mask.
func (o *updateOptions) fill(c *cli, fs *pflag.FlagSet, in *sandboxv1.UpdateSandboxRequest) error {
	spec := in.GetSandbox().GetSpec()
	if times := count(fs.Changed("ttl"), fs.Changed("expire"), o.noExpire); times > 1 {
		return usagef("--ttl, --expire and --no-expire exclude each other")
	}
	mask := func(path string) { in.UpdateMask.Paths = append(in.UpdateMask.Paths, path) }
	switch {
	case fs.Changed("ttl"):
		if o.ttl <= 0 {
			return usagef("--ttl is %s, want more than 0", o.ttl)
		}
		spec.ExpireTime = timestamppb.New(c.Clock.Now().Add(o.ttl))
		mask("spec.expire_time")
	case o.expire != "":
		at, err := time.Parse(time.RFC3339, o.expire)
		if err != nil {
			return usagef("--expire is %q, want a time such as 2030-01-02T15:04:05Z", o.expire)
		}
		spec.ExpireTime = timestamppb.New(at)
		mask("spec.expire_time")
	case o.noExpire:
		mask("spec.expire_time")
	}
	if o.policy != "" {
		policy, err := parsePolicy(o.policy)
		if err != nil {
			return err
		}
		spec.FailurePolicy = policy
		mask("spec.failure_policy")
	}
	if fs.Changed("recovery-timeout") {
		spec.RecoveryTimeout = durationpb.New(o.recovery)
		mask("spec.recovery_timeout")
	}
	return nil
}

// build fills what builds on the sandbox as it is: labels and the revision. The uid keeps the change from another sandbox
// of the name.
func buildUpdate(ctx context.Context, c *cli, o *updateOptions, in *sandboxv1.UpdateSandboxRequest) error {
	if _, _, err := split(o.labels); err != nil {
		return err
	}
	now, err := c.get(ctx, in.GetSandbox().GetName())
	if err != nil {
		return err
	}
	in.Sandbox.Uid = now.GetUid()
	if o.reset {
		in.Sandbox.Spec.ResetRevision = revisionAfter(now.GetSpec().GetResetRevision(), c.Clock.Now())
		in.UpdateMask.Paths = append(in.UpdateMask.Paths, "spec.reset_revision")
	}
	if len(o.labels) > 0 {
		if in.Sandbox.Labels, err = relabel(now.GetLabels(), o.labels); err != nil {
			return err
		}
		in.UpdateMask.Paths = append(in.UpdateMask.Paths, "labels")
	}
	return nil
}

// revisionAfter is now, or just after the last revision if a clock that is ahead of this one has set that: revisions only
// move forward, in microseconds.
func revisionAfter(last *timestamppb.Timestamp, now time.Time) *timestamppb.Timestamp {
	if last != nil && !now.After(last.AsTime()) {
		now = last.AsTime().Add(time.Microsecond)
	}
	return timestamppb.New(now)
}

// relabel is what the changes make of labels.
func relabel(labels map[string]string, changes []string) (map[string]string, error) {
	set, drop, err := split(changes)
	if err != nil {
		return nil, err
	}
	if labels, err = overlay(labels, set, "label"); err != nil {
		return nil, err
	}
	labels = maps.Clone(labels)
	maps.DeleteFunc(labels, func(key, _ string) bool { return slices.Contains(drop, key) })
	return labels, nil
}

// split tells the labels that are to be set (KEY=VALUE) from those that are to go (KEY-).
func split(changes []string) (set, drop []string, err error) {
	for _, change := range changes {
		if strings.Contains(change, "=") || !strings.HasSuffix(change, "-") {
			set = append(set, change)
		} else {
			drop = append(drop, strings.TrimSuffix(change, "-"))
		}
	}
	_, err = overlay(nil, set, "label")
	return set, drop, err
}

func count(given ...bool) int {
	n := 0
	for _, g := range given {
		if g {
			n++
		}
	}
	return n
}
