package cmd

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	authv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/auth/v1"
)

func newAPIKey(c *cli) *cobra.Command {
	key := &cobra.Command{
		Use: "apikey", Aliases: []string{"apikeys"},
		Short: "Create, list and revoke API keys",
		Long: `Create, list and revoke API keys. A key stands for a ServiceAccount of the namespace: who has the key may do in this API what
the ServiceAccount may do. You need the right to create tokens of the ServiceAccounts (create serviceaccounts/token).`,
		Example: "  fsb-ctl apikey create builder\n  fsb-ctl apikey list\n  fsb-ctl apikey revoke 7f3k2mq5xw4bn6ta",
		Args:    cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q, want create, list or revoke", args[0])
			}
			return cmd.Help()
		},
	}
	key.AddCommand(newAPIKeyCreate(c), newAPIKeyList(c), newAPIKeyRevoke(c))
	return key
}

func newAPIKeyCreate(c *cli) *cobra.Command {
	in := &authv1.CreateAPIKeyRequest{}
	var ttl time.Duration
	cmd := &cobra.Command{
		Use:   "create SERVICEACCOUNT",
		Short: "Create an API key for a ServiceAccount",
		Long: `Create an API key for a ServiceAccount of the namespace and print it. It is not stored and cannot be shown again. It is valid
until it is revoked, until --ttl has passed, or until the ServiceAccount is deleted.`,
		Example: `  fsb-ctl apikey create builder --description "CI of team a"
  FSB_TOKEN=$(fsb-ctl apikey create builder --ttl 24h) fsb-ctl list`,
		Args:              exactly("SERVICEACCOUNT"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.access()
			if err != nil {
				return err
			}
			in.Namespace, in.ServiceAccount = c.settings.Namespace, args[0]
			if cmd.Flags().Changed("ttl") {
				in.Ttl = durationpb.New(ttl)
			}
			// Not repeated: a call whose answer was lost has made a key.
			ctx, cancel := context.WithTimeout(cmd.Context(), c.settings.Timeout)
			defer cancel()
			out, err := client.CreateAPIKey(ctx, in)
			if err != nil {
				return c.classify(err)
			}
			if done, err := c.print(out); done {
				return err
			}
			_, err = fmt.Fprintln(c.Out, out.GetKey())
			c.infof("apikey/%s created; the key is not shown again", out.GetApiKey().GetId())
			return err
		},
	}
	cmd.Flags().StringVar(&in.Description, "description", "", "what the key is for")
	cmd.Flags().DurationVar(&ttl, "ttl", 0, "`duration` after which the key ends, at least 1m (default: never)")
	return cmd
}

func newAPIKeyList(c *cli) *cobra.Command {
	return &cobra.Command{
		Use: "list", Aliases: []string{"ls"},
		Short:             "List the API keys of the namespace",
		Long:              "List the API keys of the ServiceAccounts of the namespace, without their secrets.",
		Example:           "  fsb-ctl apikey list\n  fsb-ctl apikey list -n team-a -o json",
		Args:              exactly(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := c.access()
			if err != nil {
				return err
			}
			out, err := call(cmd.Context(), c, "listing API keys", func(ctx context.Context) (*authv1.ListAPIKeysResponse, error) {
				return client.ListAPIKeys(ctx, &authv1.ListAPIKeysRequest{Namespace: c.settings.Namespace})
			})
			if err != nil {
				return err
			}
			return printAPIKeys(c, out.GetApiKeys())
		},
	}
}

func printAPIKeys(c *cli, keys []*authv1.APIKey) error {
	if done, err := printList(c, "apiKeys", keys); done {
		return err
	}
	if c.settings.Output == "name" {
		for _, k := range keys {
			if err := c.printNames("apikey", k.GetId()); err != nil {
				return err
			}
		}
		return nil
	}
	if len(keys) == 0 {
		c.infof("no API keys found")
		return nil
	}
	return render.APIKeys(keys, c.Clock.Now(), c.settings.Output == "wide").Flush(c.Out)
}

func newAPIKeyRevoke(c *cli) *cobra.Command {
	return &cobra.Command{
		Use:               "revoke ID...",
		Short:             "Revoke API keys",
		Long:              "Revoke API keys of the namespace. Servers refuse them within ten seconds.",
		Example:           "  fsb-ctl apikey revoke 7f3k2mq5xw4bn6ta",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.access()
			if err != nil {
				return err
			}
			for _, id := range args {
				in := &authv1.RevokeAPIKeyRequest{Namespace: c.settings.Namespace, Id: id}
				if _, err := call(cmd.Context(), c, "revoking "+id, func(ctx context.Context) (*authv1.RevokeAPIKeyResponse, error) {
					return client.RevokeAPIKey(ctx, in)
				}); err != nil {
					return err
				}
				if err := c.printNames("apikey", id); err != nil {
					return err
				}
			}
			return nil
		},
	}
}
