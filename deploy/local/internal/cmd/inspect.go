package cmd

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/cluster"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
)

func newStatus(c *components.Config) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:     "status",
		Short:   "Show the state of the cluster; exit code 0 only if all of it is healthy",
		Example: "  sudo fsb-local status\n  sudo fsb-local status -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "table" && output != "json" {
				return fmt.Errorf("--output: %q is neither table nor json", output)
			}
			status := cluster.Inspect(cmd.Context(), *c, time.Now())
			if output == "json" {
				encoder := json.NewEncoder(cmd.OutOrStdout())
				encoder.SetIndent("", "  ")
				if err := encoder.Encode(status); err != nil {
					return fmt.Errorf("printing the status: %w", err)
				}
			} else if err := status.Print(cmd.OutOrStdout()); err != nil {
				return err
			}
			if !status.Healthy {
				return errUnhealthy
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "table", "table or json")
	return cmd
}

func newEnv(c *components.Config) *cobra.Command {
	return &cobra.Command{
		Use:     "env",
		Short:   "Print what a shell must export to use the cluster",
		Example: "  eval \"$(fsb-local env)\"",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, pair := range cluster.Environment(*c) {
				quoted := "'" + strings.ReplaceAll(pair[1], "'", `'\''`) + "'"
				if _, err := fmt.Fprintf(cmd.OutOrStdout(), "export %s=%s\n", pair[0], quoted); err != nil {
					return fmt.Errorf("printing the environment: %w", err)
				}
			}
			return nil
		},
	}
}

func newLogs(c *components.Config) *cobra.Command {
	var follow bool
	var lines int
	cmd := &cobra.Command{
		Use:     "logs COMPONENT",
		Short:   "Show the log of a component, or of the supervisor",
		Example: "  sudo fsb-local logs kubelet --tail 50\n  sudo fsb-local logs kube-apiserver --follow",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] != "supervisor" {
				if _, err := cluster.Find(*c, args[0]); err != nil {
					return err
				}
			}
			options := []string{"-n", strconv.Itoa(lines)}
			if follow {
				options = append(options, "-F")
			}
			tail := exec.CommandContext(cmd.Context(), "tail", append(options, c.LogFile(args[0]))...)
			tail.Stdout, tail.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
			if err := tail.Run(); err != nil && cmd.Context().Err() == nil {
				return fmt.Errorf("showing the log: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "keep showing new lines")
	cmd.Flags().IntVar(&lines, "tail", 100, "number of last lines to show")
	return cmd
}

func newLoadImage(c *components.Config) *cobra.Command {
	return &cobra.Command{
		Use:     "load-image ARCHIVE",
		Short:   "Import an image archive (docker save or OCI) for Pods and sandboxes",
		Example: "  docker save my-function:1 | sudo fsb-local load-image -\n  sudo fsb-local load-image my-function.tar",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return cluster.LoadImage(cmd.Context(), *c, args[0])
		},
	}
}

func newRestart(c *components.Config) *cobra.Command {
	return &cobra.Command{
		Use:     "restart COMPONENT",
		Short:   "Restart a component and wait until it works; containers keep running",
		Example: "  sudo fsb-local restart containerd",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return cluster.Restart(cmd.Context(), *c, args[0])
		},
	}
}

// proxies returns the proxy settings of the environment, which containerd needs to pull images behind a proxy.
func proxies() []string {
	var found []string
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"} {
		if value := os.Getenv(name); value != "" { //nolint:forbidigo // no other code of this module reads the environment
			found = append(found, name+"="+value)
		}
	}
	return found
}
