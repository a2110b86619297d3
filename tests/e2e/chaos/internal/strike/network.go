package strike

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/plan"
)

// table is the nftables table that a cut adds to an allocator Pod's network namespace.
const table = "fsb_chaos"

// cutNetwork drops every packet between the leading allocator and one agent, in both directions.
func cutNetwork(ctx context.Context, s *Striker, f plan.Fault, out *audit.Strike) (func() error, error) {
	pod, err := s.leader(ctx, allocator)
	if err != nil {
		return nil, err
	}
	agents, err := s.agents(ctx)
	if err != nil {
		return nil, err
	}
	agent := agents[f.Pick%uint64(len(agents))]
	out.Target = pod.Name + " from " + agent.Name
	rules := fmt.Sprintf(`table ip %[1]s {
	chain out { type filter hook output priority 0; policy accept; ip daddr %[2]s drop; }
	chain in { type filter hook input priority 0; policy accept; ip saddr %[2]s drop; }
}
`, table, agent.Status.PodIP)
	if err := nft(string(pod.UID), rules); err != nil {
		return nil, err
	}
	return func() error { return uncut(string(pod.UID)) }, nil
}

// uncut removes a cut. It is removed already if the Pod does not exist.
func uncut(podUID string) error {
	if len(insiders(podUID)) == 0 {
		return nil
	}
	return nft(podUID, fmt.Sprintf("table ip %[1]s\ndelete table ip %[1]s\n", table))
}

// nft applies rules inside the network namespace of a Pod.
func nft(podUID, rules string) error {
	pids := insiders(podUID)
	if len(pids) == 0 {
		return fmt.Errorf("no process of Pod %s runs", podUID)
	}
	cmd := exec.Command("nsenter", fmt.Sprintf("--net=/proc/%d/ns/net", pids[0]), "nft", "-f", "-")
	var output bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(rules), &output, &output
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("changing the rules of Pod %s: %w: %s", podUID, err, strings.TrimSpace(output.String()))
	}
	return nil
}

// mend undoes the faults of a harness that was killed: cuts, and stopped allocators.
func (s *Striker) mend(ctx context.Context) error {
	if err := resume(""); err != nil {
		return err
	}
	pods, err := s.pods(ctx, s.System, allocator, map[string]string{"app.kubernetes.io/name": allocator})
	if err != nil {
		return err
	}
	for _, p := range pods {
		if err := uncut(string(p.UID)); err != nil {
			return err
		}
	}
	return nil
}
