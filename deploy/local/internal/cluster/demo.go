package cluster

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/network"
)

// The addresses of Fast Sandbox for clients outside the cluster: the node ports of its services.
const (
	gatewayAddress   = network.NodeIP + ":30090"
	gatewayURL       = "https://" + network.NodeIP + ":30080"
	allocatorAddress = network.NodeIP + ":30091"

	demoImage   = "docker.io/fast-sandbox/busybox:demo"
	demoTimeout = 2 * time.Minute
)

// demo waits for an agent of the pool "default" and runs a first sandbox on it.
func demo(ctx context.Context, c components.Config, p *progress) error {
	ctx, cancel := context.WithTimeout(ctx, demoTimeout)
	defer cancel()
	err := host.Poll(ctx, readyInterval, func(ctx context.Context) error {
		out, err := kubectl(ctx, c, "", "get", "sandboxpools.fast-sandbox.io", "default", "--namespace", "default",
			"--output", "jsonpath={.status.readyAgents}")
		if err != nil {
			return err
		}
		if ready, _ := strconv.Atoi(strings.TrimSpace(out)); ready < 1 {
			return errors.New("no agent of the SandboxPool default/default is ready")
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("waiting for an agent: %w", err)
	}
	p.say("an agent is ready; next: a first sandbox")
	err = report(ctx, c, p, "run", "hello-"+strings.ToLower(rand.Text()[:6]), "--image", demoImage, "--rm", "--", "echo", "hello from a sandbox")
	if err != nil {
		return fmt.Errorf("running the first sandbox: %w", err)
	}
	agent, err := kubectl(ctx, c, "", "get", "pods", "--namespace", "default", "--selector", "fast-sandbox.io/pool=default",
		"--output", "jsonpath={.items[0].metadata.name}")
	if err != nil {
		return fmt.Errorf("looking for an agent: %w", err)
	}
	p.say("asking the garbage collector why the agent is there: fsb-ctl gc explain pod/%s", agent)
	if err := report(ctx, c, p, "gc", "explain", "pod/"+strings.TrimSpace(agent)); err != nil {
		return fmt.Errorf("asking the garbage collector: %w", err)
	}
	return nil
}

// report runs fsb-ctl and prints its output as progress.
func report(ctx context.Context, c components.Config, p *progress, args ...string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(c.BinDir, "fsb-ctl"), args...)
	cmd.Env = environment(c)
	out, err := cmd.CombinedOutput()
	for line := range strings.Lines(strings.TrimSpace(string(out))) {
		p.say("  | %s", strings.TrimRight(line, "\n"))
	}
	return err
}
