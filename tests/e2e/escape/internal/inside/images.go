package inside

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/image"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// createTime is how long a create may take, whatever its image is.
const createTime = 30 * time.Second

// HostileImages makes a sandbox of each hostile image.
func HostileImages(ctx context.Context, s *mesh.Scene, canary *mesh.Canary) error {
	list := image.HostileImages(Repository, canary.Path, s.Program)
	for _, h := range list {
		s.Say("hostile image: %s", h.Name)
		if err := h.Import(ctx, s.Node); err != nil {
			return err
		}
		attempt := suite.Attempt{
			Name: "images: " + h.Name, Does: "makes a sandbox of an image that " + h.Does,
			Success: "the directory of the canary on the node has changed, the canary can be read, or the create does not end in time or leaves something",
		}
		if h.MustFail {
			attempt.Success = "a sandbox is made of it, or the create does not end in time or leaves something"
		}
		evidence, refused := tryImage(ctx, s, h, canary)
		s.Log.Made(attempt, "", evidence, refused)
		if err := s.Node.ImageService().Delete(ctx, h.Ref); err != nil {
			return fmt.Errorf("removing image %s: %w", h.Ref, err)
		}
	}
	return nil
}

func tryImage(ctx context.Context, s *mesh.Scene, h image.Hostile, canary *mesh.Canary) (string, error) {
	name := "image"
	spec := &sandboxv1.SandboxSpec{Image: h.Ref, Command: append([]string{attack.Program, attack.ReadArg}, h.Read...), Env: map[string]string{attack.EnvName: s.Env.String()}}
	evidence, refused := tryCreate(ctx, s, name, spec)
	if h.MustFail && refused == nil && evidence == "" {
		evidence = "a sandbox was made of it"
	}
	if err := remove(ctx, s, name); err != nil {
		evidence = "the create has left something: " + err.Error()
	}
	touched, err := canary.Touched()
	switch {
	case err != nil:
		return "", err
	case touched != "":
		return touched, nil
	}
	return evidence, refused
}

// tryCreate makes a sandbox whose program reads something. It returns evidence if the program has found the canary or the create does not
// end, and an error if the create is refused.
func tryCreate(ctx context.Context, s *mesh.Scene, name string, spec *sandboxv1.SandboxSpec) (string, error) {
	creating, cancel := context.WithTimeout(ctx, createTime)
	defer cancel()
	_, err := s.Hostile.Create(creating, name, spec)
	switch {
	case status.Code(err) == codes.DeadlineExceeded || creating.Err() != nil:
		return fmt.Sprintf("the create has not ended after %s", createTime), nil
	case err != nil && !mesh.Typed(err):
		return "the error is not typed: " + err.Error(), nil
	case err != nil:
		return "", err
	}
	evidence := ""
	reading, cancelReading := context.WithTimeout(ctx, createTime)
	defer cancelReading()
	err = s.Hostile.Output(reading, name, func(line []byte) {
		var o suite.Outcome
		if json.Unmarshal(line, &o) == nil && o.Evidence != "" {
			evidence = o.Evidence
		}
	})
	if err != nil && evidence == "" {
		return "", suite.Brokenf("reading the output: %w", err)
	}
	return evidence, nil
}

// WorkingDirs makes sandboxes whose working directory is a descriptor of the program that starts them (CVE-2024-21626).
func WorkingDirs(ctx context.Context, s *mesh.Scene) error {
	for where, pool := range map[string]string{"slot": s.Hostile.Pool, "cold": s.Cold} {
		s.Say("working directories in /proc: %s", where)
		attempt := suite.Attempt{
			Name: "working directory: a descriptor of the runtime", Does: "starts in /proc/self/fd/N for the first descriptors, and walks up from there",
			Success: "the canary on the node can be read",
		}
		evidence, refused := "", error(nil)
		for fd := 3; fd < 12 && evidence == ""; fd++ {
			var err error
			evidence, err = tryCreate(ctx, s, "cwd", &sandboxv1.SandboxSpec{
				Image: RootImage, Pool: pool, WorkingDir: fmt.Sprintf("/proc/self/fd/%d", fd), Command: []string{attack.Program, "attack", "descriptors: working directory"},
				Env: map[string]string{attack.EnvName: s.Env.String()},
			})
			if err != nil {
				refused = err
			}
			if err := remove(ctx, s, "cwd"); err != nil {
				evidence = "the create has left something: " + err.Error()
			}
		}
		s.Log.Made(attempt, where, evidence, refused)
	}
	return nil
}
