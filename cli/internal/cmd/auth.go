package cmd

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	authv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/auth/v1"
)

// access returns a client of the API about callers.
func (c *cli) access() (authv1.AuthServiceClient, error) {
	conn, err := c.connect()
	if err != nil {
		return nil, err
	}
	return authv1.NewAuthServiceClient(conn), nil
}

func newAuth(c *cli) *cobra.Command {
	auth := &cobra.Command{
		Use:     "auth",
		Short:   "Show who you are and what you may do",
		Long:    "Show who you are for the servers, and what you may do there.",
		Example: "  fsb-ctl auth whoami\n  fsb-ctl auth can-i create sandboxes",
		Args:    cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q, want whoami or can-i", args[0])
			}
			return cmd.Help()
		},
	}
	auth.AddCommand(newWhoAmI(c), newCanI(c))
	return auth
}

func newWhoAmI(c *cli) *cobra.Command {
	return &cobra.Command{
		Use:               "whoami",
		Short:             "Show your user and groups",
		Long:              "Show the user and the groups that the servers know you by, and how you proved who you are.",
		Example:           "  fsb-ctl auth whoami\n  FSB_TOKEN=$(kubectl create token builder --audience fast-sandbox.io) fsb-ctl auth whoami",
		Args:              exactly(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := c.access()
			if err != nil {
				return err
			}
			me, err := call(cmd.Context(), c, "asking who you are", func(ctx context.Context) (*authv1.WhoAmIResponse, error) {
				return client.WhoAmI(ctx, &authv1.WhoAmIRequest{})
			})
			if err != nil {
				return err
			}
			if done, err := c.print(me); done {
				return err
			}
			t := render.NewTable("ATTRIBUTE", "VALUE")
			t.Add("User", me.GetUser())
			t.Add("UID", me.GetUid())
			t.Add("Groups", strings.Join(me.GetGroups(), ", "))
			t.Add("Method", strings.ToLower(strings.TrimPrefix(me.GetMethod().String(), "METHOD_")))
			return t.Flush(c.Out)
		},
	}
}

func newCanI(c *cli) *cobra.Command {
	all := false
	cmd := &cobra.Command{
		Use:   "can-i VERB RESOURCE",
		Short: "Show whether you may do something",
		Long: `Show whether you may do something in the namespace: print yes or no, with the reason if there is one. The exit code of no
is 9. RESOURCE is a resource of the group fast-sandbox.io, RESOURCE/SUBRESOURCE, or RESOURCE.GROUP.`,
		Example:           "  fsb-ctl auth can-i create sandboxes\n  fsb-ctl auth can-i get sandboxes/log -n team-a\n  fsb-ctl auth can-i list sandboxes --all-namespaces",
		Args:              exactly("VERB", "RESOURCE"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.access()
			if err != nil {
				return err
			}
			in := accessRequest(args[0], args[1])
			if !all {
				in.Namespace = c.settings.Namespace
			}
			answer, err := call(cmd.Context(), c, "asking what you may do", func(ctx context.Context) (*authv1.CheckAccessResponse, error) {
				return client.CheckAccess(ctx, in)
			})
			if err != nil {
				return err
			}
			return printAccess(c, answer)
		},
	}
	cmd.Flags().BoolVarP(&all, "all-namespaces", "A", false, "in all namespaces")
	return cmd
}

// accessRequest parses RESOURCE, RESOURCE/SUBRESOURCE, RESOURCE.GROUP and RESOURCE.GROUP/SUBRESOURCE.
func accessRequest(verb, resource string) *authv1.CheckAccessRequest {
	in := &authv1.CheckAccessRequest{Verb: verb}
	resource, in.Subresource, _ = strings.Cut(resource, "/")
	name, group, ok := strings.Cut(resource, ".")
	if in.Resource = name; ok {
		in.Group = &group
	}
	return in
}

func printAccess(c *cli, answer *authv1.CheckAccessResponse) error {
	done, err := c.print(answer)
	if !done {
		word := map[bool]string{true: "yes", false: "no"}[answer.GetAllowed()]
		if answer.GetReason() != "" {
			word += " - " + answer.GetReason()
		}
		_, err = fmt.Fprintln(c.Out, word)
	}
	if err == nil && !answer.GetAllowed() {
		err = exitError{exitPermission}
	}
	return err
}
