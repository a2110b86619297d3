package inside

import (
	"context"
	"fmt"
	"strings"
	"time"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// huge are specs with more than a process can be given.
func huge() map[string]*sandboxv1.SandboxSpec {
	many := func(n, size int) []string {
		out := make([]string, n)
		for i := range out {
			out[i] = strings.Repeat("x", size)
		}
		return out
	}
	env := map[string]string{}
	for i := range 1000 {
		env[fmt.Sprintf("VARIABLE_%d", i)] = strings.Repeat("x", 3000)
	}
	return map[string]*sandboxv1.SandboxSpec{
		"an argument of 200 KiB":            {Args: many(1, 200<<10)},
		"arguments of 3 MiB":                {Args: many(25, 120<<10)},
		"arguments of 60 MiB":               {Args: many(500, 120<<10)},
		"an environment of 3 MiB":           {Env: env},
		"a zero byte in an argument":        {Args: []string{"a\x00b"}},
		"a deep working directory":          {WorkingDir: "/" + strings.Repeat("d/", 2000)},
		"a working directory that walks up": {WorkingDir: "/../../../../../.." + strings.Repeat("/..", 100)},
	}
}

// Arguments makes sandboxes with more than a process can be given, on both paths.
func Arguments(ctx context.Context, s *mesh.Scene) error {
	for where, pool := range map[string]string{"slot": s.Hostile.Pool, "cold": s.Cold} {
		for name, spec := range huge() {
			s.Say("arguments: %s (%s)", name, where)
			spec.Image, spec.Pool = RootImage, pool
			if len(spec.GetArgs()) == 0 {
				spec.Args = []string{attack.ChildArg}
			}
			evidence, refused := tryCreate(ctx, s, "huge", spec)
			if err := remove(ctx, s, "huge"); err != nil {
				evidence = "the create has left something: " + err.Error()
			}
			s.Log.Made(suite.Attempt{Name: "arguments: " + name, Does: "makes a sandbox with it", Success: "the create does not end in time, its error is not typed, or it leaves something"},
				where, evidence, refused)
		}
	}
	return nil
}

// taken returns the capacity that sandboxes of the hostile tenant hold.
func taken(ctx context.Context, s *mesh.Scene) (int32, error) {
	list, err := s.Hostile.Allocator.ListAgents(ctx, &allocatorv1.ListAgentsRequest{Namespace: s.Hostile.Namespace})
	if err != nil {
		return 0, fmt.Errorf("listing the agents: %w", err)
	}
	n := int32(0)
	for _, a := range list.GetAgents() {
		n += a.GetAllocated()
	}
	return n, nil
}

// Capacity runs attempts and looks whether they have kept capacity.
func Capacity(ctx context.Context, s *mesh.Scene, attempts ...func(context.Context, *mesh.Scene) error) error {
	before, err := taken(ctx, s)
	if err != nil {
		return err
	}
	for _, a := range attempts {
		if err := a(ctx, s); err != nil {
			return err
		}
	}
	after := int32(0)
	err = mesh.Poll(ctx, mesh.SettleTime/time.Duration(3), func(ctx context.Context) error {
		var err error
		if after, err = taken(ctx, s); err == nil && after > before {
			err = fmt.Errorf("%d capacity units are in use, %d were before", after, before)
		}
		return err
	})
	evidence := ""
	if err != nil {
		evidence = err.Error()
	}
	s.Log.Made(suite.Attempt{Name: "images: keep capacity", Does: "makes sandboxes that must fail", Success: "the agents count capacity as used"}, "", evidence,
		fmt.Errorf("%d capacity units are in use, %d were before", after, before))
	return nil
}
