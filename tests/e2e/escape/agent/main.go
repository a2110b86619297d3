// Command agent is a hostile agent. It runs in the Pod of a pool in place of the real one, with the certificate that the controller has
// issued to it, keeps the contract of an agent without containers, and lies about everything that is not its own. With the argument
// `wait` it does nothing, and with `probe` it says that it is ready, as the kubelet's probes ask.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/rogue"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch {
	case len(os.Args) > 1 && os.Args[1] == "probe":
		return
	case len(os.Args) > 1 && os.Args[1] == "wait":
		<-ctx.Done()
		return
	}
	if err := run(ctx); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "agent:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	lies, err := rogue.ParseLies(config.Env(rogue.LiesEnv))
	if err != nil {
		return err
	}
	capacity, err := strconv.ParseInt(config.Env("AGENT_CAPACITY"), 10, 32)
	if err != nil {
		return fmt.Errorf("reading the capacity: %w", err)
	}
	info := &agentv1.AgentInfo{
		PodName: config.Env("POD_NAME"), PodUid: config.Env("POD_UID"), Namespace: config.Env("POD_NAMESPACE"), Pool: config.Env("AGENT_POOL"),
		NodeName: config.Env("NODE_NAME"), PodIp: config.Env("POD_IP"), Capacity: int32(capacity), RuntimeHandler: "runc", Version: "hostile",
	}
	a := fakeagent.New(info)
	a.Wrap = func(truth agentv1.AgentServiceServer) agentv1.AgentServiceServer { return lies.Service(info, truth) }
	var listen net.ListenConfig
	l, err := listen.Listen(ctx, "tcp", config.Env("FSB_BIND_ADDRESS"))
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	return a.Serve(ctx, l, rpc.TLS{CertFile: config.Env("FSB_TLS_CERT_FILE"), KeyFile: config.Env("FSB_TLS_KEY_FILE"), CAFile: config.Env("FSB_TLS_CA_FILE")})
}
