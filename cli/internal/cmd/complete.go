package cmd

import (
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/config"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// completeTimeout bounds the wait for a completion.
const completeTimeout = 2 * time.Second

// completion returns completions. It loads the settings, because prepare does not run for a completion, and bounds the time.
// An error means no completions: a shell cannot show it.
func (c *cli) completion(cmd *cobra.Command, names func(context.Context) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	settings, err := config.Load(cmd.Flags(), c.Getenv, c.DefaultConfigFile)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	settings.Timeout = completeTimeout
	c.settings = settings
	c.progress.on = false
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	found, err := names(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return found, cobra.ShellCompDirectiveNoFileComp
}

// completeSandbox completes the name of one sandbox.
func (c *cli) completeSandbox(cmd *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return c.completeSandboxes(cmd, args, toComplete)
}

// completeSandboxes completes names of sandboxes that the command line does not have yet.
func (c *cli) completeSandboxes(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return c.completion(cmd, func(ctx context.Context) ([]string, error) {
		all, err := c.listAll(ctx, &sandboxv1.ListSandboxesRequest{Namespace: c.settings.Namespace, PageSize: pageSize})
		if err != nil {
			return nil, err
		}
		return slices.DeleteFunc(names(all), func(name string) bool { return slices.Contains(args, name) }), nil
	})
}

// completePools completes the name of a pool.
func (c *cli) completePools(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return c.completion(cmd, func(ctx context.Context) ([]string, error) {
		pools, err := listPools(ctx, c, c.settings.Namespace)
		out := make([]string, len(pools))
		for i, p := range pools {
			out[i] = p.GetName()
		}
		return out, err
	})
}
