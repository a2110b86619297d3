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
	grace, finished time.Duration
	expire, policy  string
	noExpire, reset bool
	labels          []string
}

func newUpdate(c *cli) *cobra.Command {
	o := &updateOptions{}
	cmd := &cobra.Command{
		Use:   "update NAME [flags]",
		Short: "Change a sandbox",
		Long: "Change the expire time, failure policy, grace period, labels and time to live of a sandbox, or reset it. Image, command,\n" +
			"ports and pool cannot be changed on a running container.",
		Example: `  # ten minutes more from now
  fsb-ctl update web --ttl 10m

  # never
  fsb-ctl update web --no-expire

  # replace the container, on any agent of the pool with capacity
  fsb-ctl update web --reset

  # a longer grace period, and delete the sandbox an hour after its process ends
  fsb-ctl update web --grace 30s --ttl-after-finished 1h

  # set one label and remove another
  fsb-ctl update web --label team=red --label old-`,
		Args:              exactly("NAME"),
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			return updateSandbox(cmd.Context(), c, o, cmd.Flags(), args[0])
		},
	}
	fs := cmd.Flags()
	fs.DurationVar(&o.ttl, "ttl", 0, "expire after this `duration` from now")
	fs.StringVar(&o.expire, "expire", "", "expire at this `time` (RFC 3339): 2030-01-02T15:04:05Z")
	fs.BoolVar(&o.noExpire, "no-expire", false, "never expire")
	fs.BoolVar(&o.reset, "reset", false, "replace the container with a new one")
	fs.StringVar(&o.policy, "failure-policy", "", "`policy` for a lost agent: manual or auto-recreate")
	fs.DurationVar(&o.recovery, "recovery-timeout", 0, "`duration` for which auto-recreate waits for a lost agent")
	fs.DurationVar(&o.grace, "grace", 0, "`duration` between SIGTERM and SIGKILL when the sandbox ends")
	fs.DurationVar(&o.finished, "ttl-after-finished", 0, "delete the sandbox this `duration` after its process has ended")
	fs.StringArrayVarP(&o.labels, "label", "l", nil, "`KEY=VALUE` sets a label, KEY- removes it; may be repeated")
	_ = cmd.RegisterFlagCompletionFunc("failure-policy", cobra.FixedCompletions(policies(), cobra.ShellCompDirectiveNoFileComp))
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
		return usagef("nothing to change: at least one flag is required, for instance --ttl, --reset or --label")
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

// fill sets the fields of the spec and adds them to the mask.
func (o *updateOptions) fill(c *cli, fs *pflag.FlagSet, in *sandboxv1.UpdateSandboxRequest) error {
	spec := in.GetSandbox().GetSpec()
	if n := count(fs.Changed("ttl"), fs.Changed("expire"), o.noExpire); n > 1 {
		return usagef("--ttl, --expire and --no-expire are mutually exclusive")
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
	o.durations(fs, spec, mask)
	return nil
}

// durations sets the fields that are durations.
func (o *updateOptions) durations(fs *pflag.FlagSet, spec *sandboxv1.SandboxSpec, mask func(path string)) {
	if fs.Changed("recovery-timeout") {
		spec.RecoveryTimeout = durationpb.New(o.recovery)
		mask("spec.recovery_timeout")
	}
	if fs.Changed("grace") {
		spec.TerminationGracePeriod = durationpb.New(o.grace)
		mask("spec.termination_grace_period")
	}
	if fs.Changed("ttl-after-finished") {
		spec.TtlAfterFinished = durationpb.New(o.finished)
		mask("spec.ttl_after_finished")
	}
}

// buildUpdate sets the fields that depend on the present sandbox: labels and the revision. The uid protects another sandbox
// of the same name from the change.
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

// revisionAfter returns now, or the next microsecond after the last revision if that is later: another machine's clock may be
// ahead, and revisions only increase.
func revisionAfter(last *timestamppb.Timestamp, now time.Time) *timestamppb.Timestamp {
	if last != nil && !now.After(last.AsTime()) {
		now = last.AsTime().Add(time.Microsecond)
	}
	return timestamppb.New(now)
}

// relabel returns the labels after the changes.
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

// split separates labels to set (KEY=VALUE) from labels to remove (KEY-).
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
