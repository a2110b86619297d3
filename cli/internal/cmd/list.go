package cmd

import (
	"context"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// pageSize is the number of sandboxes in one call.
const pageSize = 500

// selection selects sandboxes.
type selection struct {
	all            bool
	selector, pool string
	phases         []string
}

func (s *selection) addFlags(c *cli, cmd *cobra.Command, phases bool) {
	fs := cmd.Flags()
	fs.StringVarP(&s.selector, "selector", "l", "", "only sandboxes whose labels match the `selector` key=value,key2!=value2")
	fs.StringVar(&s.pool, "pool", "", "only sandboxes of this `pool`")
	_ = cmd.RegisterFlagCompletionFunc("pool", c.completePools)
	if phases {
		s.addPhases(cmd, fs)
	}
}

func (s *selection) addPhases(cmd *cobra.Command, fs *pflag.FlagSet) {
	fs.BoolVarP(&s.all, "all-namespaces", "A", false, "sandboxes of all namespaces")
	fs.StringSliceVar(&s.phases, "phase", nil, "only sandboxes in one of these `phases`: "+strings.Join(render.Phases(), ", "))
	_ = cmd.RegisterFlagCompletionFunc("phase", cobra.FixedCompletions(render.Phases(), cobra.ShellCompDirectiveNoFileComp))
}

func (s *selection) request(c *cli) (*sandboxv1.ListSandboxesRequest, error) {
	in := &sandboxv1.ListSandboxesRequest{Namespace: c.settings.Namespace, Pool: s.pool, LabelSelector: s.selector, PageSize: pageSize}
	if s.all {
		in.Namespace = ""
	}
	for _, p := range s.phases {
		phase, ok := render.ParsePhase(p)
		if !ok {
			return nil, usagef("--phase is %q, want one of %s", p, strings.Join(render.Phases(), ", "))
		}
		in.Phases = append(in.Phases, phase)
	}
	return in, nil
}

func newList(c *cli) *cobra.Command {
	s := &selection{}
	watch := false
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"},
		Short: "List sandboxes",
		Long:  "List the sandboxes of a namespace, sorted by name.",
		Example: `  fsb-ctl list
  fsb-ctl list -A -o wide
  fsb-ctl list -l team=red --phase Running,Pending
  fsb-ctl list -w`,
		Args:              exactly(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			in, err := s.request(c)
			if err != nil {
				return err
			}
			if watch {
				return watchSandboxes(cmd.Context(), c, watchOf(in), s.all, false)
			}
			return listSandboxes(cmd.Context(), c, in, s.all)
		},
	}
	s.addFlags(c, cmd, true)
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "continue with changes, until Ctrl-C")
	return cmd
}

func listSandboxes(ctx context.Context, c *cli, in *sandboxv1.ListSandboxesRequest, namespaces bool) error {
	all, err := c.listAll(ctx, in)
	if err != nil {
		return err
	}
	if done, err := printList(c, "sandboxes", all); done {
		return err
	}
	if c.settings.Output == "name" {
		return c.printNames("sandbox", names(all)...)
	}
	if len(all) == 0 {
		if namespaces {
			c.infof("no sandboxes found")
		} else {
			c.infof("no sandboxes found in namespace %s", in.GetNamespace())
		}
		return nil
	}
	columns := render.Columns{Namespace: namespaces, Wide: c.settings.Output == "wide"}
	t := render.Sandboxes(columns)
	now := c.Clock.Now()
	for _, s := range all {
		t.Add(render.Row(columns, "", s, now)...)
	}
	return t.Flush(c.Out)
}

// listAll reads all pages.
func (c *cli) listAll(ctx context.Context, in *sandboxv1.ListSandboxesRequest) ([]*sandboxv1.Sandbox, error) {
	client, err := c.sandboxes()
	if err != nil {
		return nil, err
	}
	var all []*sandboxv1.Sandbox
	for {
		page, err := call(ctx, c, "listing sandboxes", func(ctx context.Context) (*sandboxv1.ListSandboxesResponse, error) {
			return client.ListSandboxes(ctx, in)
		})
		if err != nil {
			return nil, err
		}
		all = append(all, page.GetSandboxes()...)
		if in.PageToken = page.GetNextPageToken(); in.GetPageToken() == "" {
			return all, nil
		}
	}
}
