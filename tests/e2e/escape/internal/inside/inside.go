// Package inside makes the attempts of code in a sandbox: it runs the hostile program in sandboxes of every kind, makes sandboxes of hostile
// images and in hostile working directories, and proves the checks in an open container.
package inside

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/image"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// Repository is the beginning of the references of all images of the suite.
const Repository = "docker.io/fast-sandbox/escape"

// RootImage and UserImage run the hostile program as root and as user 1000.
const (
	RootImage = Repository + "-root:dev"
	UserImage = Repository + "-user:dev"
)

// runTime is how long all attacks in one sandbox may take.
const runTime = 3 * time.Minute

// Images are the images of the hostile program.
func Images(program []byte) []image.Image {
	layers := [][]image.Entry{image.Base(program)}
	return []image.Image{
		{Ref: RootImage, Entrypoint: []string{attack.Program}, Layers: layers},
		{Ref: UserImage, Entrypoint: []string{attack.Program}, Layers: layers, User: "1000:1000"},
	}
}

// variant is a kind of sandbox.
type variant struct {
	user  attack.User
	image string
	pool  string
	path  sandboxv1.StartPath
	first bool // of its user
}

func (v variant) String() string {
	if v.path == sandboxv1.StartPath_START_PATH_SLOT {
		return string(v.user) + ", slot"
	}
	return string(v.user) + ", cold"
}

func variants(s *mesh.Scene) []variant {
	slot, cold := sandboxv1.StartPath_START_PATH_SLOT, sandboxv1.StartPath_START_PATH_COLD
	return []variant{
		{attack.Root, RootImage, s.Hostile.Pool, slot, true}, {attack.Root, RootImage, s.Cold, cold, false},
		{attack.Mere, UserImage, s.Hostile.Pool, slot, false}, {attack.Mere, UserImage, s.Cold, cold, false},
	}
}

// Sandboxes makes all attacks in each kind of sandbox.
func Sandboxes(ctx context.Context, s *mesh.Scene) error {
	for _, v := range variants(s) {
		s.Say("attacks in a sandbox: %s", v)
		env := s.Env
		if v.pool != s.Hostile.Pool { // no other sandbox is there
			env.Abstract, env.Roommate = "", ""
		}
		attacks := attack.For(v.user, v.first)
		if env.Abstract == "" {
			attacks = withoutRoommate(attacks)
		}
		s.Log.Plan(v.String(), attack.Attempts(attacks)...)
		planned := map[string]bool{}
		for _, a := range attacks {
			planned[a.Name] = true
		}
		err := runIn(ctx, s, v, env, func(o suite.Outcome) {
			if o.Where = v.String(); planned[o.Name] {
				s.Log.Add(o)
			}
		})
		if err != nil {
			return fmt.Errorf("running attacks in a sandbox (%s): %w", v, err)
		}
	}
	return nil
}

// withoutRoommate returns the attacks that can be made without another sandbox of the agent.
func withoutRoommate(attacks []attack.Attack) (out []attack.Attack) {
	for _, a := range attacks {
		if !a.NeedsRoommate {
			out = append(out, a)
		}
	}
	return out
}

// runIn runs the program in a sandbox and passes each of its outcomes on.
func runIn(ctx context.Context, s *mesh.Scene, v variant, env attack.Env, add func(suite.Outcome)) error {
	ctx, cancel := context.WithTimeout(ctx, runTime)
	defer cancel()
	const name = "attacks"
	if v.path == sandboxv1.StartPath_START_PATH_SLOT { // one that was claimed is replaced in the background
		if err := s.AwaitAgents(ctx, s.Hostile, v.pool, 1, 1); err != nil {
			return err
		}
	}
	args := []string{"run"}
	if v.first {
		args = append(args, "first")
	}
	resp, err := s.Hostile.Create(ctx, name, &sandboxv1.SandboxSpec{Image: v.image, Args: args, Pool: v.pool, Env: map[string]string{attack.EnvName: env.String()}})
	if err != nil {
		return err
	}
	if resp.GetStartPath() != v.path {
		err = fmt.Errorf("the sandbox was started by %s, want %s", resp.GetStartPath(), v.path)
	} else {
		err = s.Hostile.Output(ctx, name, func(line []byte) {
			var o suite.Outcome
			if json.Unmarshal(line, &o) == nil && o.Name != "" {
				add(o)
			}
		})
	}
	if err != nil {
		_ = s.Hostile.Delete(context.WithoutCancel(ctx), name)
		return err
	}
	return remove(ctx, s, name)
}

// remove deletes a sandbox of the hostile tenant and waits until nothing is left of it.
func remove(ctx context.Context, s *mesh.Scene, name string) error {
	if err := s.Hostile.Delete(ctx, name); err != nil {
		return err
	}
	return mesh.Poll(ctx, mesh.SettleTime, func(ctx context.Context) error {
		if _, err := s.Hostile.Get(ctx, name); err == nil {
			return fmt.Errorf("sandbox %s is still there", name)
		}
		left, err := s.Containers(ctx, s.Hostile.Namespace, name)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("containers of %s are left: %v", name, left)
		}
		return err
	})
}
