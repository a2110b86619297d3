package cmd

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func newPs(c *cli) *cobra.Command {
	all := false
	cmd := &cobra.Command{
		Use:   "ps NAME",
		Short: "List the commands of a sandbox",
		Long: "List the sandbox's own process, whose tag is `main`, and the commands that `exec` has started there. What they start themselves is\n" +
			"not listed. With --all, those that have ended are, too, as long as the sandbox remembers them.",
		Example:           "  fsb-ctl ps web\n  fsb-ctl ps web --all -o wide",
		Args:              exactly("NAME"),
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			list, err := c.listProcesses(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if !all {
				list = slices.DeleteFunc(list, func(p *processv1.Process) bool { return p.GetExit() != nil })
			}
			if done, err := printList(c, "processes", list); done {
				return err
			}
			if c.settings.Output == "name" {
				for _, p := range list {
					if err := c.printNames("process", strconv.Itoa(int(p.GetPid()))); err != nil {
						return err
					}
				}
				return nil
			}
			return render.Processes(list, c.Clock.Now(), c.settings.Output == "wide").Flush(c.Out)
		},
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also commands that have ended")
	return cmd
}

func (c *cli) listProcesses(ctx context.Context, name string) ([]*processv1.Process, error) {
	client, err := c.processes()
	if err != nil {
		return nil, err
	}
	out, err := call(ctx, c, "listing the commands of "+name, func(ctx context.Context) (*processv1.ListProcessesResponse, error) {
		return client.ListProcesses(ctx, &processv1.ListProcessesRequest{Namespace: c.settings.Namespace, Name: name})
	})
	return out.GetProcesses(), err
}

// selectorOf returns the process that a user names by its pid or its tag.
func selectorOf(text string) *processv1.ProcessSelector {
	if pid, err := strconv.ParseInt(text, 10, 32); err == nil && pid > 0 {
		return &processv1.ProcessSelector{By: &processv1.ProcessSelector_Pid{Pid: int32(pid)}}
	}
	return &processv1.ProcessSelector{By: &processv1.ProcessSelector_Tag{Tag: text}}
}

// completeProcess completes the name of a sandbox, and then the tag or pid of one of its commands.
func (c *cli) completeProcess(cmd *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
	if len(args) != 1 {
		return c.completeSandbox(cmd, args, toComplete)
	}
	return c.completion(cmd, func(ctx context.Context) ([]string, error) {
		list, err := c.listProcesses(ctx, args[0])
		var found []string
		for _, p := range list {
			switch {
			case p.GetExit() != nil:
			case p.GetTag() != "":
				found = append(found, p.GetTag())
			default:
				found = append(found, strconv.Itoa(int(p.GetPid()))+"\t"+strings.Join(p.GetArgs(), " "))
			}
		}
		return found, err
	})
}

func newKill(c *cli) *cobra.Command {
	name, group := "TERM", false
	cmd := &cobra.Command{
		Use:   "kill NAME PID|TAG",
		Short: "Send a signal to a command of a sandbox",
		Long: "Send a signal to a command that `exec` has started, or with the tag `main` to the sandbox's own process. With --group the\n" +
			"signal goes to all processes that the command has started, as far as they have not left its process group.",
		Example:           "  fsb-ctl kill web build\n  fsb-ctl kill web 42 -s KILL --group",
		Args:              exactly("NAME", "PID|TAG"),
		ValidArgsFunction: c.completeProcess,
		RunE: func(cmd *cobra.Command, args []string) error {
			sig, err := parseSignal(name)
			if err != nil {
				return err
			}
			client, err := c.processes()
			if err != nil {
				return err
			}
			_, err = call(cmd.Context(), c, "sending the signal", func(ctx context.Context) (*processv1.SendSignalResponse, error) {
				return client.SendSignal(ctx, &processv1.SendSignalRequest{
					Namespace: c.settings.Namespace, Name: args[0], Process: selectorOf(args[1]), Signal: sig, Group: group,
				})
			})
			return err
		},
	}
	cmd.Flags().StringVarP(&name, "signal", "s", name, "`signal`, by its name or number")
	signals := []string{"TERM", "INT", "HUP", "KILL", "QUIT", "USR1", "USR2", "STOP", "CONT", "WINCH"}
	_ = cmd.RegisterFlagCompletionFunc("signal", cobra.FixedCompletions(signals, cobra.ShellCompDirectiveNoFileComp))
	cmd.Flags().BoolVarP(&group, "group", "g", false, "send it to the process group")
	return cmd
}

// parseSignal accepts TERM, SIGTERM and 15.
func parseSignal(text string) (int32, error) {
	if n, err := strconv.ParseInt(text, 10, 32); err == nil && n >= 1 && n <= 64 {
		return int32(n), nil
	}
	if sig := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(text), "SIG")); sig != 0 {
		return int32(sig), nil
	}
	return 0, usagef("--signal %q is no signal", text)
}

func newAttach(c *cli) *cobra.Command {
	noInput, fromStart := false, false
	cmd := &cobra.Command{
		Use:   "attach NAME [PID|TAG]",
		Short: "Show the output of a command that runs in a sandbox, and give it input",
		Long: `Show the output of a command that "exec" has started, from the first byte that is kept, until it ends, and exit with its exit code.
Without PID or TAG it is the command with a terminal that was started last, and else the one that was started last.

Input is passed on if the command takes any. Ctrl-P Ctrl-Q detaches from a command with a terminal, Ctrl-C from another one; it runs on.
For the output of the sandbox's own process, use "logs".`,
		Example: "  fsb-ctl attach web\n  fsb-ctl attach web build --no-stdin",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 1 || len(args) > 2 {
				return usagef("want NAME [PID|TAG]")
			}
			return nil
		},
		ValidArgsFunction: c.completeProcess,
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := c.processToAttach(cmd.Context(), args)
			if err != nil {
				return err
			}
			client, err := c.processes()
			if err != nil {
				return err
			}
			from := int64(0)
			if p.GetTerminal() && !fromStart {
				from = max(p.GetFirstOffset(), p.GetEndOffset()-4096) // about a screen
			}
			s := &session{cli: c, client: client, name: args[0], stdin: p.GetInput() && !noInput, terminal: p.GetTerminal(), next: from}
			return s.follow(cmd.Context(), &processv1.ProcessSelector{By: &processv1.ProcessSelector_Pid{Pid: p.GetPid()}}, from)
		},
	}
	cmd.Flags().BoolVar(&noInput, "no-stdin", false, "pass no input on")
	cmd.Flags().BoolVar(&fromStart, "from-start", false, "show all that is kept, also of a terminal")
	return cmd
}

// processToAttach returns the process that the user means.
func (c *cli) processToAttach(ctx context.Context, args []string) (*processv1.Process, error) {
	list, err := c.listProcesses(ctx, args[0])
	if err != nil {
		return nil, err
	}
	var found *processv1.Process
	for _, p := range list { // in the order of their starts
		switch {
		case len(args) == 2:
			if by := selectorOf(args[1]); by.GetPid() == p.GetPid() && by.GetTag() == "" || by.GetTag() != "" && by.GetTag() == p.GetTag() {
				found = p
			}
		case p.GetExit() == nil && p.GetTag() != mainTag && (p.GetTerminal() || found == nil || !found.GetTerminal()):
			found = p
		}
	}
	switch {
	case found == nil && len(args) == 2:
		return nil, fault.New(errdefs.ErrNotFound, fault.ProcessNotFound, "sandbox %q has no command %q", args[0], args[1])
	case found == nil:
		return nil, fault.New(errdefs.ErrNotFound, fault.ProcessNotFound, "no command of \"exec\" runs in sandbox %q", args[0])
	case found.GetTag() == mainTag:
		return nil, usagef("the output of the sandbox's own process is in its log: %s logs -f %s", c.program(), args[0])
	}
	return found, nil
}

// mainTag is the tag of a sandbox's own process.
const mainTag = "main"
