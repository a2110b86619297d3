package cmd

import (
	"encoding/json"
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
)

func newConfig(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use: "config", Short: "Show the settings",
		Long:    "Show the settings in force.",
		Example: "  fsb-ctl config view",
		Args:    cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q, want view", args[0])
			}
			return cmd.Help()
		},
	}
	cmd.AddCommand(&cobra.Command{
		Use: "view", Short: "Show each setting and its source",
		Long: "Show each setting and its source: a flag, the environment, the configuration file or the default. Keys are shown as file names.",
		Example: `  fsb-ctl config view
  fsb-ctl config view -o yaml > ~/.config/fast-sandbox/config.yaml`,
		Args: exactly(), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(*cobra.Command, []string) error { return viewConfig(c) },
	})
	return cmd
}

func viewConfig(c *cli) error {
	if c.settings.Output == "json" || c.settings.Output == "yaml" {
		values := map[string]string{}
		for _, v := range c.settings.Values {
			if v.Value != "" && v.Key != "output" { // the output format of this call is not a setting
				values[v.Key] = v.Value
			}
		}
		raw, err := json.MarshalIndent(values, "", "  ")
		if err != nil {
			return err
		}
		return c.printJSON(append(raw, '\n'))
	}
	t := render.NewTable("SETTING", "VALUE", "SOURCE")
	for _, v := range c.settings.Values {
		t.Add(v.Key, v.Value, v.Source)
	}
	return t.Flush(c.Out)
}

func newVersion(c *cli) *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version",
		Long: "Print the version of this program.", Example: "  fsb-ctl version",
		Args: exactly(), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(*cobra.Command, []string) error {
			v := map[string]string{"version": c.Version, "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH}
			if c.settings.Output == "json" || c.settings.Output == "yaml" {
				raw, err := json.MarshalIndent(v, "", "  ")
				if err != nil {
					return err
				}
				return c.printJSON(append(raw, '\n'))
			}
			_, err := fmt.Fprintf(c.Out, "fsb-ctl %s (%s, %s)\n", v["version"], v["go"], v["platform"])
			return err
		},
	}
}
