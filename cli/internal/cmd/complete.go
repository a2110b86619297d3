package cmd

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/config"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/transfer"
	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
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

// completeCopy completes a sandbox or one of its files for the two arguments of `cp`. Everything else is completed by the shell, as a local file.
func (c *cli) completeCopy(cmd *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 1 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	if at, err := transfer.Parse(toComplete); err == nil && at.Sandbox != "" {
		return c.completeRemote(cmd, at.Sandbox, strings.TrimPrefix(toComplete, at.Sandbox+":"))
	}
	if strings.ContainsAny(toComplete, "/.~") {
		return nil, cobra.ShellCompDirectiveDefault
	}
	found, _ := c.completeSandboxes(cmd, nil, toComplete)
	for i, name := range found {
		found[i] = name + ":"
	}
	found = slices.DeleteFunc(found, func(name string) bool { return !strings.HasPrefix(name, toComplete) })
	if len(found) == 0 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	return found, cobra.ShellCompDirectiveNoSpace
}

// completeRemote completes a path in a sandbox from one page of its directory.
func (c *cli) completeRemote(cmd *cobra.Command, name, begun string) ([]string, cobra.ShellCompDirective) {
	dir, last := "", begun
	if i := strings.LastIndexByte(begun, '/'); i >= 0 {
		dir, last = begun[:i+1], begun[i+1:]
	}
	user, _ := cmd.Flags().GetString("user")
	found, _ := c.completion(cmd, func(ctx context.Context) ([]string, error) {
		client, err := c.files()
		if err != nil {
			return nil, err
		}
		in := &filesystemv1.ListDirectoryRequest{Namespace: c.settings.Namespace, Name: name, User: user, Path: cmp.Or(dir, "."), PageSize: pageSize}
		out, err := call(ctx, c, "", func(ctx context.Context) (*filesystemv1.ListDirectoryResponse, error) {
			return client.ListDirectory(ctx, in)
		})
		var paths []string
		for _, f := range out.GetFiles() {
			if !strings.HasPrefix(f.GetName(), last) || len(f.GetRawName()) > 0 || strings.ContainsAny(f.GetName(), "\n\t") {
				continue // a shell gets one completion on a line, and a description after a tab
			}
			path := name + ":" + dir + f.GetName()
			if f.GetType() == filesystemv1.FileType_FILE_TYPE_DIRECTORY {
				path += "/"
			}
			paths = append(paths, path)
		}
		return paths, err
	})
	directive := cobra.ShellCompDirectiveNoFileComp
	if len(found) == 1 && strings.HasSuffix(found[0], "/") {
		directive |= cobra.ShellCompDirectiveNoSpace
	}
	return found, directive
}

// completePorts completes the name of a sandbox, and then the ports that it has said it listens on.
func (c *cli) completePorts(cmd *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 0 {
		return c.completeSandbox(cmd, args, toComplete)
	}
	return c.completion(cmd, func(ctx context.Context) ([]string, error) {
		client, err := c.sandboxes()
		if err != nil {
			return nil, err
		}
		out, err := call(ctx, c, "", func(ctx context.Context) (*sandboxv1.GetSandboxResponse, error) {
			return client.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: c.settings.Namespace, Name: args[0]})
		})
		var found []string
		for _, port := range out.GetSandbox().GetSpec().GetPorts() {
			if text := strconv.Itoa(int(port)); !slices.Contains(args[1:], text) {
				found = append(found, text)
			}
		}
		return found, err
	})
}
