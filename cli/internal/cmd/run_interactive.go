package cmd

import (
	"context"
	"errors"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// interactive reports whether the command is run in the sandbox as `exec` does.
func (o *runOptions) interactive() bool { return o.stdin || o.terminal }

// keepCommand keeps the command for later: the sandbox is created without one.
func (o *runOptions) keepCommand(command []string) error {
	switch {
	case o.attach:
		return usagef("--attach is for the sandbox's own process, and -i and -t run the command beside it")
	case o.request.keepEntrypoint:
		return usagef("--keep-entrypoint does not go with -i and -t, which run the command as it is")
	case len(command) == 0:
		return usagef("a COMMAND is required after -- with -i and -t")
	}
	o.command, o.request.keepAlive = command, true
	return nil
}

// enter runs the command in the new sandbox, and deletes the sandbox afterwards if that is asked for.
func (o *runOptions) enter(ctx context.Context, c *cli, client sandboxv1.SandboxServiceClient, s *sandboxv1.Sandbox) error {
	e := &execOptions{stdin: o.stdin, terminal: o.terminal}
	err := e.run(ctx, c, s.GetName(), o.command)
	switch {
	case !o.rm:
		return err
	case e.left:
		c.infof("sandbox %q is not deleted; delete it with: %s delete -n %s %s", s.GetName(), c.program(), s.GetNamespace(), s.GetName())
		return err
	}
	if cleanErr := removeSandbox(ctx, c, client, s); cleanErr != nil {
		c.infof("sandbox %q is not deleted: %v", s.GetName(), cleanErr)
		err = errors.Join(err, cleanErr)
	}
	return err
}
