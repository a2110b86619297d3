package cmd

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
)

func newAgents(c *cli) *cobra.Command {
	all, pool := false, ""
	cmd := &cobra.Command{
		Use: "agents", Aliases: []string{"agent"},
		Short: "List agents",
		Long: "List the agents of a namespace as the allocator observes them. SLOTS is the number of free slots and of those that the\n" +
			"agent keeps ready; -o wide shows why an agent keeps none although its pool wants some.",
		Example:           "  fsb-ctl agents\n  fsb-ctl agents --pool default -o wide",
		Args:              exactly(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			namespace := c.settings.Namespace
			if all {
				namespace = ""
			}
			client, err := c.allocator()
			if err != nil {
				return err
			}
			out, err := call(cmd.Context(), c, "listing agents", func(ctx context.Context) (*allocatorv1.ListAgentsResponse, error) {
				return client.ListAgents(ctx, &allocatorv1.ListAgentsRequest{Namespace: namespace, Pool: pool})
			})
			if err != nil {
				return err
			}
			return printAgents(c, out.GetAgents(), all)
		},
	}
	cmd.Flags().BoolVarP(&all, "all-namespaces", "A", false, "agents of all namespaces")
	cmd.Flags().StringVar(&pool, "pool", "", "only agents of this `pool`")
	_ = cmd.RegisterFlagCompletionFunc("pool", c.completePools)
	return cmd
}

func printAgents(c *cli, agents []*allocatorv1.Agent, namespaces bool) error {
	if done, err := printList(c, "agents", agents); done {
		return err
	}
	if c.settings.Output == "name" {
		for _, a := range agents {
			if err := c.printNames("pod", a.GetInfo().GetPodName()); err != nil {
				return err
			}
		}
		return nil
	}
	if len(agents) == 0 {
		c.infof("no agents found")
		return nil
	}
	return render.Agents(agents, namespaces, c.settings.Output == "wide", c.Clock.Now()).Flush(c.Out)
}
