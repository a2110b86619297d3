package cmd

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
)

func newPool(c *cli) *cobra.Command {
	pool := &cobra.Command{
		Use: "pool", Aliases: []string{"pools", "sbp"},
		Short: "Show pools",
		Long: "Show pools: the agents that run sandboxes, their capacity, and the number of free slots and of those that they keep\n" +
			"ready (SLOTS; off: the pool wants none).",
		Example: "  fsb-ctl pool list\n  fsb-ctl pool get default -o yaml",
		Args:    cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q, want list or get", args[0])
			}
			return cmd.Help()
		},
	}
	pool.AddCommand(newPoolList(c), newPoolGet(c))
	return pool
}

func newPoolList(c *cli) *cobra.Command {
	all := false
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"},
		Short:             "List pools",
		Long:              "List the pools of a namespace with their agents and capacity.",
		Example:           "  fsb-ctl pool list\n  fsb-ctl pool list -A -o wide",
		Args:              exactly(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			namespace := c.settings.Namespace
			if all {
				namespace = ""
			}
			pools, err := listPools(cmd.Context(), c, namespace)
			if err != nil {
				return err
			}
			if len(pools) == 0 && c.settings.Output != "json" && c.settings.Output != "yaml" {
				c.infof("no pools found")
				return nil
			}
			return printPools(c, pools, all)
		},
	}
	cmd.Flags().BoolVarP(&all, "all-namespaces", "A", false, "pools of all namespaces")
	return cmd
}

func newPoolGet(c *cli) *cobra.Command {
	return &cobra.Command{
		Use:               "get NAME",
		Short:             "Show one pool",
		Long:              "Show one pool with its agents and capacity.",
		Example:           "  fsb-ctl pool get default -o wide",
		Args:              exactly("NAME"),
		ValidArgsFunction: c.completePools,
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.allocator()
			if err != nil {
				return err
			}
			out, err := call(cmd.Context(), c, "getting pool "+args[0], func(ctx context.Context) (*allocatorv1.GetPoolResponse, error) {
				return client.GetPool(ctx, &allocatorv1.GetPoolRequest{Namespace: c.settings.Namespace, Name: args[0]})
			})
			if err != nil {
				return err
			}
			if done, err := c.print(out.GetPool()); done {
				return err
			}
			return printPools(c, []*allocatorv1.Pool{out.GetPool()}, false)
		},
	}
}

// listPools returns the pools of a namespace; of all namespaces if it is empty.
func listPools(ctx context.Context, c *cli, namespace string) ([]*allocatorv1.Pool, error) {
	client, err := c.allocator()
	if err != nil {
		return nil, err
	}
	out, err := call(ctx, c, "listing pools", func(ctx context.Context) (*allocatorv1.ListPoolsResponse, error) {
		return client.ListPools(ctx, &allocatorv1.ListPoolsRequest{Namespace: namespace})
	})
	return out.GetPools(), err
}

func printPools(c *cli, pools []*allocatorv1.Pool, namespaces bool) error {
	if done, err := printList(c, "pools", pools); done {
		return err
	}
	if c.settings.Output == "name" {
		for _, p := range pools {
			if err := c.printNames("sandboxpool", p.GetName()); err != nil {
				return err
			}
		}
		return nil
	}
	return render.Pools(pools, namespaces, c.settings.Output == "wide", c.Clock.Now()).Flush(c.Out)
}
