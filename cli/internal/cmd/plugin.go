package cmd

import (
	"strings"

	"github.com/spf13/cobra"
)

// completionPrefix begins the name of the program that kubectl runs for the completions of a plugin.
const completionPrefix = "kubectl_complete-"

// program returns how the user has called the program: "kubectl fsb" if it is kubectl-fsb.
func (c *cli) program() string {
	if plugin, ok := strings.CutPrefix(c.Name, "kubectl-"); ok {
		return "kubectl " + strings.ReplaceAll(plugin, "_", "-")
	}
	return c.Name
}

// named returns a text about fsb-ctl with the name of the program.
func (c *cli) named(text string) string {
	if c.program() == c.Name {
		return text
	}
	return strings.ReplaceAll(text, "fsb-ctl", c.program())
}

// rename gives the help of a command and of those below it the name of the program.
func (c *cli) rename(cmd *cobra.Command) {
	cmd.Short, cmd.Long, cmd.Example = c.named(cmd.Short), c.named(cmd.Long), c.named(cmd.Example)
	for _, sub := range cmd.Commands() {
		c.rename(sub)
	}
}
