package cmd

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/forward"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	tunnelv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/tunnel/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/tunnel"
)

// forwardOptions are the flags and arguments of `port-forward`.
type forwardOptions struct {
	addresses []string
	mappings  []forward.Mapping
}

// forwarded is a local port as programs see it.
type forwarded struct {
	Address    string `json:"address"`
	LocalPort  int    `json:"localPort"`
	RemotePort int    `json:"remotePort"`
}

func newPortForward(c *cli) *cobra.Command {
	o := &forwardOptions{}
	cmd := &cobra.Command{
		Use:   "port-forward NAME [LOCAL:]REMOTE...",
		Short: "Forward local ports to TCP ports of a sandbox",
		Long: `Forward connections to local ports to TCP ports of a sandbox, those of its loopback interface included, until Ctrl-C, which is exit
code 0. Without LOCAL the local port is that of the sandbox; :REMOTE uses any free port. The ports are printed when they are open;
with -o json or yaml, as one object.

A connection that fails is reported, and the others continue. If the gateway restarts, connections are lost and new ones are made;
if the sandbox ends, so does the command.`,
		Example: `  fsb-ctl port-forward web 8080
  fsb-ctl port-forward web 8080:80 5432

  # any free port, for a script
  fsb-ctl port-forward web :80 -o json

  # for other machines
  fsb-ctl port-forward web 8080:80 --address 0.0.0.0`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) < 2 {
				return exactly("NAME", "PORT")(nil, args)
			}
			for _, text := range args[1:] {
				m, err := forward.Parse(text)
				if err != nil {
					return usageError{err}
				}
				o.mappings = append(o.mappings, m)
			}
			return nil
		},
		ValidArgsFunction: c.completePorts,
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.run(cmd.Context(), c, args[0])
		},
	}
	cmd.Flags().StringSliceVar(&o.addresses, "address", []string{"127.0.0.1"}, "local `address` to listen at, or localhost; may be repeated")
	_ = cmd.RegisterFlagCompletionFunc("address", cobra.FixedCompletions([]string{"127.0.0.1", "localhost", "0.0.0.0", "::"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (o *forwardOptions) run(ctx context.Context, c *cli, name string) error {
	client, err := c.sandboxes()
	if err != nil {
		return err
	}
	s, err := forwardable(ctx, c, client, name)
	if err != nil {
		return err
	}
	ports, err := o.listen(ctx)
	if err != nil {
		return err
	}
	f := &forward.Forwarder{Namespace: c.settings.Namespace, Sandbox: name, Clock: c.Clock, Report: c.infof}
	tunnels := tunnelv1.NewTunnelServiceClient(c.conn)
	f.Open = func(ctx context.Context) (tunnel.Stream, error) { return tunnels.Tunnel(ctx) }
	// The sandbox is watched if the user may do that; a stream that is refused because it does not run yet is then opened again.
	f.Retry = func(err error) bool {
		err = c.classify(ended(err))
		return errdefs.IsUnavailable(err) || s != nil && fault.ReasonOf(err) == fault.PhaseConflict
	}
	if err := printForwarded(c, ports); err != nil {
		closeAll(ports)
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	watched, one := make(chan struct{}), *c
	go func() {
		defer close(watched)
		if s != nil {
			cancel(untilEnd(ctx, &one, client, s, f.Restart))
		}
	}()
	err = f.Run(ctx, ports)
	cause := context.Cause(ctx)
	cancel(nil)
	<-watched
	if err != nil {
		return c.classify(err)
	}
	if cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil // Ctrl-C is how it ends
}

// forwardable returns the sandbox, which must run; nil if the user may not read it.
func forwardable(ctx context.Context, c *cli, client sandboxv1.SandboxServiceClient, name string) (*sandboxv1.Sandbox, error) {
	out, err := call(ctx, c, "looking for "+name, func(ctx context.Context) (*sandboxv1.GetSandboxResponse, error) {
		return client.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: c.settings.Namespace, Name: name})
	})
	if errdefs.IsPermissionDenied(err) {
		return nil, nil //nolint:nilnil // the tunnel has a permission of its own
	}
	if err != nil {
		return nil, err
	}
	return out.GetSandbox(), over(name, out.GetSandbox())
}

// over returns an error if a sandbox has ended; nil means that it was deleted.
func over(name string, s *sandboxv1.Sandbox) error {
	st := s.GetStatus()
	switch {
	case s == nil, st.GetPhase() == sandboxv1.Phase_PHASE_TERMINATING:
		return fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "sandbox %q was deleted", name)
	case st != nil && st.ExitCode != nil:
		return fault.New(errdefs.ErrFailedPrecondition, fault.PhaseConflict, "the process of sandbox %q has ended with exit code %d", name, st.GetExitCode())
	case st.GetPhase() == sandboxv1.Phase_PHASE_EXPIRED:
		return fault.New(errdefs.ErrFailedPrecondition, fault.PhaseConflict, "sandbox %q has expired", name)
	case st.GetPhase() == sandboxv1.Phase_PHASE_FAILED:
		return fault.New(errdefs.ErrFailedPrecondition, fault.PhaseConflict, "sandbox %q failed: %s %s", name, st.GetReason(), st.GetMessage())
	}
	return nil
}

// untilEnd waits until a sandbox has ended, and returns how. It calls restarted when the sandbox has another container. Without the permission to watch
// it waits for the end of ctx.
func untilEnd(ctx context.Context, c *cli, client sandboxv1.SandboxServiceClient, s *sandboxv1.Sandbox, restarted func()) error {
	attempt := s.GetStatus().GetAttempt()
	see := func(now *sandboxv1.Sandbox) error {
		if err := over(s.GetName(), now); err != nil {
			return err
		}
		if n := now.GetStatus().GetAttempt(); n != attempt {
			attempt = n
			restarted()
		}
		return nil
	}
	for {
		err := watchOne(ctx, c, client, s, see)
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // the command has ended
		case errdefs.IsPermissionDenied(err):
			<-ctx.Done()
			return nil
		case !errdefs.IsUnavailable(err) && !errors.Is(err, context.DeadlineExceeded) && fault.ReasonOf(err) != fault.Overloaded:
			return err
		}
	}
}

// watchOne calls see with each state of a sandbox, nil when it was deleted, until that or the stream fails.
func watchOne(ctx context.Context, c *cli, client sandboxv1.SandboxServiceClient, s *sandboxv1.Sandbox, see func(*sandboxv1.Sandbox) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	in := &sandboxv1.WatchSandboxesRequest{Namespace: s.GetNamespace(), Name: s.GetName()}
	type opened = begun[sandboxv1.WatchSandboxesResponse]
	b, err := call(ctx, c, "", func(callCtx context.Context) (opened, error) {
		return opening(ctx, callCtx, false, func(streamCtx context.Context) (opened, error) {
			stream, err := client.WatchSandboxes(streamCtx, in)
			if err != nil {
				return opened{}, err
			}
			first, err := stream.Recv()
			return opened{stream, first}, ended(err)
		})
	})
	if err != nil {
		return err
	}
	defer cancelStream(cancel, b.stream)
	seen := false
	for event := b.first; ; {
		same := event.GetSandbox().GetUid() == s.GetUid()
		switch event.GetType() {
		case sandboxv1.WatchSandboxesResponse_TYPE_SYNCED:
			if !seen {
				err = see(nil)
			}
		case sandboxv1.WatchSandboxesResponse_TYPE_DELETED:
			if same {
				err = see(nil)
			}
		default:
			if seen = true; same {
				err = see(event.GetSandbox())
			} else {
				err = see(nil)
			}
		}
		if err != nil {
			return err
		}
		if event, err = b.stream.Recv(); err != nil {
			return c.classify(ended(err))
		}
	}
}

// listen opens the local ports: all or none of them.
func (o *forwardOptions) listen(ctx context.Context) (ports []forward.Port, err error) {
	defer func() {
		if err != nil {
			closeAll(ports)
		}
	}()
	for _, m := range o.mappings {
		local := m.Local
		for _, address := range o.addresses {
			hosts := []string{address}
			if address == "localhost" {
				hosts = []string{"127.0.0.1", "::1"}
			}
			if ip := net.ParseIP(hosts[0]); ip == nil {
				return ports, usagef("--address is %q, want an IP address or localhost", address)
			}
			for i, host := range hosts {
				l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(local)))
				if err != nil && i > 0 {
					continue // a machine without IPv6
				}
				if err != nil {
					return ports, fault.New(errdefs.ErrFailedPrecondition, reasonLocalPort, "%s", err)
				}
				ports = append(ports, forward.Port{Listener: l, Remote: m.Remote})
				local = cmp.Or(local, portOf(l))
			}
		}
	}
	return ports, nil
}

func portOf(l net.Listener) int { return l.Addr().(*net.TCPAddr).Port }

func closeAll(ports []forward.Port) {
	for _, p := range ports {
		_ = p.Listener.Close()
	}
}

func printForwarded(c *cli, ports []forward.Port) error {
	list := struct {
		Forwards []forwarded `json:"forwards"`
	}{}
	for _, p := range ports {
		host, _, err := net.SplitHostPort(p.Listener.Addr().String())
		if err != nil {
			return err
		}
		list.Forwards = append(list.Forwards, forwarded{host, portOf(p.Listener), p.Remote})
	}
	if c.settings.Output == "json" || c.settings.Output == "yaml" {
		raw, err := json.MarshalIndent(list, "", "  ")
		if err != nil {
			return err
		}
		return c.printJSON(append(raw, '\n'))
	}
	for _, f := range list.Forwards {
		line := net.JoinHostPort(f.Address, strconv.Itoa(f.LocalPort))
		if c.settings.Output != "name" {
			line = fmt.Sprintf("forwarding %s to port %d", line, f.RemotePort)
		}
		if _, err := fmt.Fprintln(c.Out, line); err != nil {
			return err
		}
	}
	return nil
}
