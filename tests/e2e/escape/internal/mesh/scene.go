package mesh

import (
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/google/uuid"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// Neighbor is the name of the target, and Roommate that of a sandbox of the hostile tenant that it shares an agent with.
const (
	Neighbor = "neighbor"
	Roommate = "roommate"
)

// Scene is what all parts of a run share.
type Scene struct {
	*Mesh
	// Victim and Hostile are two tenants. Hostile has two pools: its own, with slots, and Cold, without.
	Victim, Hostile *Tenant
	Cold            string
	// Target is a sandbox of Victim, which runs all the time.
	Target *Target
	// Log collects the outcomes.
	Log *suite.Log
	// Env is what attacks know.
	Env attack.Env
	// Program is the hostile program, and Agent the hostile agent.
	Program, Agent []byte
	// Say reports progress.
	Say func(format string, args ...any)
}

// Canary is a directory on the node with files that no tenant can reach: the canary, and a passwd file.
type Canary struct{ Dir, Path, Secret string }

// CanaryParent is on the node's disk, which the images are on, too.
const CanaryParent = "/var/lib"

// NewCanary makes one below a directory.
func NewCanary(parent string) (*Canary, error) {
	dir, err := os.MkdirTemp(parent, "escape-canary-")
	if err != nil {
		return nil, fmt.Errorf("making the canary: %w", err)
	}
	c := &Canary{Dir: dir, Path: filepath.Join(dir, "canary"), Secret: uuid.NewString()}
	return c, c.write()
}

func (c *Canary) write() error {
	for name, content := range map[string]string{"canary": c.Secret, "passwd": "root:x:0:0::/:/\nevil:x:1000:1000::/:/\n"} {
		if err := os.WriteFile(filepath.Join(c.Dir, name), []byte(content), 0o644); err != nil {
			return fmt.Errorf("making the canary: %w", err)
		}
	}
	return os.Chmod(c.Dir, 0o755)
}

// Touched returns what has happened to the directory since it was made, and restores it; empty if nothing has.
func (c *Canary) Touched() (string, error) {
	entries, err := os.ReadDir(c.Dir)
	if err != nil {
		return "", suite.Brokenf("looking at the canary: %w", err)
	}
	found, names := "", map[string]bool{}
	for _, e := range entries {
		names[e.Name()] = true
		if e.Name() != "canary" && e.Name() != "passwd" {
			found = filepath.Join(c.Dir, e.Name()) + " was made"
			_ = os.RemoveAll(filepath.Join(c.Dir, e.Name()))
		}
	}
	raw, _ := os.ReadFile(c.Path)
	switch {
	case !names["canary"] || !names["passwd"]:
		found = "a file beside the canary was deleted"
	case string(raw) != c.Secret:
		found = "the canary was changed"
	}
	if found == "" {
		return "", nil
	}
	return found, c.write()
}

// Remove removes the directory.
func (c *Canary) Remove() { _ = os.RemoveAll(c.Dir) }

// AgentPort returns the port of agents.
func (s *Scene) AgentPort() string {
	_, port, _ := net.SplitHostPort(s.Env.Agent)
	return port
}
