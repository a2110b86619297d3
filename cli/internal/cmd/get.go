package cmd

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

func newGet(c *cli) *cobra.Command {
	return &cobra.Command{
		Use:   "get NAME",
		Short: "Show one sandbox",
		Long:  "Show one sandbox. A sandbox is visible as soon as its create call has returned.",
		Example: `  fsb-ctl get web
  fsb-ctl get web -o json`,
		Args:              exactly("NAME"),
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := c.get(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return c.printSandbox(s)
		},
	}
}

func newDescribe(c *cli) *cobra.Command {
	return &cobra.Command{
		Use:               "describe NAME",
		Short:             "Show a sandbox in detail",
		Long:              "Show a sandbox in detail: its specification, its agent and its conditions.",
		Example:           "  fsb-ctl describe web",
		Args:              exactly("NAME"),
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := c.get(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if done, err := c.print(s); done {
				return err
			}
			return render.Describe(c.Out, s, c.Clock.Now())
		},
	}
}

func (c *cli) get(ctx context.Context, name string) (*sandboxv1.Sandbox, error) {
	client, err := c.sandboxes()
	if err != nil {
		return nil, err
	}
	out, err := call(ctx, c, "getting "+name, func(ctx context.Context) (*sandboxv1.GetSandboxResponse, error) {
		return client.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: c.settings.Namespace, Name: name})
	})
	return out.GetSandbox(), err
}

// exactly requires one argument for each word, which names it in messages.
func exactly(words ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		switch {
		case len(args) < len(words):
			return usagef("%s is missing", words[len(args)])
		case len(args) > len(words):
			return usagef("unexpected argument %q", args[len(words)])
		default:
			return nil
		}
	}
}
