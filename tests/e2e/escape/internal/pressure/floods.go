package pressure

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/load"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

const (
	// answerTime is how long a server may take to answer another caller during a flood.
	answerTime = 10 * time.Second
	// maxGrowth is how much memory a server may take for a flood.
	maxGrowth = 256 << 20
)

// target is a port that sandboxes can reach.
type target struct {
	name string
	args []string // of the load
	// program is the path of the server's program, whose memory is measured; empty for none.
	program string
	// answers asks the server something as another caller.
	answers func(ctx context.Context, s *mesh.Scene, neighbor string) error
	// expected is the issue that keeps sandboxes from the port, of a server outside the mesh; empty for servers of the mesh.
	expected string
}

func targets(e *attack.Env) []target {
	get := func(ctx context.Context, s *mesh.Scene, neighbor string) error {
		_, err := s.Victim.Get(ctx, neighbor)
		return err
	}
	create := func(ctx context.Context, s *mesh.Scene, _ string) error { return createBeside(ctx, s) }
	kube := func(ctx context.Context, s *mesh.Scene, _ string) error {
		return s.Kube.Get(ctx, client.ObjectKey{Name: s.Victim.Namespace}, &corev1.Namespace{})
	}
	flood := func(scheme, address string) []string { return []string{load.Flood, scheme, address} }
	return []target{
		{"the agent", flood("tls", e.Agent), "/agent", create, ""},
		{"the agent's metrics port", flood("tls", e.Metrics), "/agent", create, ""},
		{"the agent, with idle connections", []string{load.Connections, e.Agent}, "/agent", create, ""},
		{"the allocator", flood("tls", e.Allocator), "/allocator", get, ""},
		{"the gateway", flood("tls", e.Gateway), "/gateway", get, ""},
		{"the kubelet", flood("tls", e.Kubelet), "", get, suite.Network},
		{"the API server", flood("tls", e.APIServer), "", kube, suite.Network},
	}
}

// Floods floods every port that a sandbox reaches, beside the neighbor.
func Floods(ctx context.Context, s *mesh.Scene, n *Samples, neighbor string) error {
	for _, t := range targets(&s.Env) {
		s.Say("flood: %s", t.name)
		before := residentOf(t)
		calm, storm, r, err := measure(ctx, s, n, bombSeconds, t.args...)
		if err != nil && r == nil {
			return err
		}
		evidence, refused := "", suite.Brokenf("measuring: %w", err)
		if err == nil {
			var ratio float64
			ratio, evidence, refused = Compare(calm, storm)
			s.Log.Figure("flood_of_"+strings.ReplaceAll(strings.TrimPrefix(t.name, "the "), " ", "_")+"_neighbor_p90_ratio", ratio)
		}
		does := "opens and resets streams, or opens connections, as fast as it can"
		s.Log.Made(suite.Attempt{Name: "floods: neighbor of a flood of " + t.name, Does: does,
			Success: fmt.Sprintf("the work of the neighbor takes more than %.0f times as long", MaxRatio), Expected: t.expected}, "", evidence, refused)
		evidence, refused = survives(ctx, s, t, neighbor, before)
		if line, failed := r.find(load.KindFailed); failed && evidence == "" {
			refused = suite.Brokenf("the flood has failed: %s", line.Text)
		}
		s.Log.Made(suite.Attempt{Name: "floods: service of " + t.name, Does: does,
			Success: fmt.Sprintf("the server does not answer another caller within %s, or takes more than %d MiB for it", answerTime, maxGrowth>>20)}, "", evidence, refused)
		if err := finish(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// survives asks the server during the flood, and measures its memory.
func survives(ctx context.Context, s *mesh.Scene, t target, neighbor string, before int64) (string, error) {
	asking, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	begin := time.Now()
	if err := t.answers(asking, s, neighbor); err != nil {
		return fmt.Sprintf("it has not answered after %s: %v", time.Since(begin).Round(time.Millisecond), err), nil
	}
	took := time.Since(begin)
	grown := residentOf(t) - before
	if grown > maxGrowth {
		return fmt.Sprintf("it has taken %d MiB more", grown>>20), nil
	}
	return "", fmt.Errorf("it has answered after %s, and taken %d MiB more", took.Round(time.Microsecond), grown>>20)
}

// createBeside makes a sandbox of the same agent as that of the flood.
func createBeside(ctx context.Context, s *mesh.Scene) error {
	const name = "beside"
	_, err := s.Hostile.Create(ctx, name, &sandboxv1.SandboxSpec{Image: inside.RootImage, Args: []string{load.Sleep, "1"}})
	return errors.Join(err, s.Hostile.Delete(context.WithoutCancel(ctx), name))
}

func residentOf(t target) int64 {
	if t.program == "" {
		return 0
	}
	return mesh.Resident(t.program)
}
