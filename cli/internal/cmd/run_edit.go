package cmd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/edit"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// defaultEditor is the editor if $EDITOR is not set.
const defaultEditor = "vi"

// editTemplate is the manifest that run --edit opens.
const editTemplate = `apiVersion: fast-sandbox.io/v1alpha1
kind: Sandbox
metadata:
  # The server generates a name if there is none.
  # name: web
  # labels: {team: red}
spec:
  image:
  # The namespace's default pool if unset.
  # poolRef: default

  # The image's own command if unset.
  # command: [python3, -c]
  # args: ["print(6*7)"]
  # workingDir: /
  # envs:
  #   - {name: NAME, value: value}
  # exposedPorts: [8080]

  # Limits; the pool's if unset.
  # resources:
  #   limits: {cpu: 500m, memory: 128Mi, pids: 64}
  # Agent (the agent's network) or None (loopback only).
  # network: Agent

  # expireTime: "2030-01-02T15:04:05Z"
  # ttlAfterFinished: 1h
  # terminationGracePeriodSeconds: 10
  # Manual or AutoRecreate, if the agent is lost.
  # failurePolicy: Manual
`

// editRequest builds the request from a manifest that the user edits, until run accepts it. Errors in the manifest, found
// here or by the server, open the editor again.
func (o *runOptions) editRequest(ctx context.Context, c *cli, cmd *cobra.Command, name string, command []string,
	run func(context.Context, *sandboxv1.CreateSandboxRequest) error,
) error {
	if o.request.file == "-" {
		return usagef("--edit and --filename - are mutually exclusive: both read standard input")
	}
	header, err := o.editHeader(c, cmd, name, command)
	if err != nil {
		return err
	}
	editor := edit.Editor{Command: c.Getenv("EDITOR"), Pattern: "fsb-ctl-run-*.yaml", In: c.In, Out: c.Out, Err: c.Err}
	if editor.Command == "" {
		editor.Command = defaultEditor
	}
	err = editor.Loop(ctx, []byte(header+editTemplate), func(saved []byte) error {
		in, err := o.request.build(c, cmd.Flags(), name, command, saved)
		if err != nil {
			return err
		}
		return run(ctx, in)
	}, func(err error) bool {
		var usage usageError
		return errors.As(err, &usage) || errdefs.IsInvalidArgument(err)
	})
	if errors.Is(err, edit.ErrUnchanged) || errors.Is(err, edit.ErrEmpty) {
		return fault.New(context.Canceled, reasonEditCanceled, "edit canceled: %s", err)
	}
	return err
}

// editHeader returns the comment above the template: how to edit, and what flags and the manifest of -f have set already.
func (o *runOptions) editHeader(c *cli, cmd *cobra.Command, name string, command []string) (string, error) {
	var b strings.Builder
	b.WriteString(`# The sandbox to run. Lines that begin with # are comments. If the file is unchanged or empty, nothing is created.
# If the sandbox is invalid, this file opens again with the error.
`)
	request := o.request
	if request.image == "" {
		request.image = "-" // the user sets it in the editor
	}
	settings := *c.settings
	settings.Pool = "" // the pool of the environment does not override the file
	flags := *c
	flags.settings = &settings
	in, err := request.build(&flags, cmd.Flags(), name, command, nil)
	if err != nil {
		return "", err
	}
	if in.GetSpec().GetImage() == "-" {
		in.Spec.Image = ""
	}
	set, err := yaml.Marshal(struct {
		Name   string            `json:"name,omitempty"`
		Labels map[string]string `json:"labels,omitempty"`
		Spec   any               `json:"spec"`
	}{in.GetName(), in.GetLabels(), setFields(in.GetSpec())})
	if err != nil {
		return "", fmt.Errorf("preparing the file to edit: %w", err)
	}
	if set = bytes.TrimSuffix(set, []byte("spec: {}\n")); len(set) > 0 {
		b.WriteString("#\n# Flags and --filename have set these fields, and override this file:\n")
		for line := range strings.Lines(string(set)) {
			b.WriteString("#   " + line)
		}
	}
	b.WriteString("\n")
	return b.String(), nil
}

// setFields returns the fields of a spec that are set, as a manifest has them.
func setFields(spec *sandboxv1.SandboxSpec) map[string]any {
	fields := map[string]any{}
	raw, err := yaml.Marshal(convert.SpecFromProto(spec))
	if err != nil || yaml.Unmarshal(raw, &fields) != nil {
		return nil
	}
	for key, value := range fields {
		if value == "" || value == nil {
			delete(fields, key)
		}
	}
	return fields
}
