package plan

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// ParseExec reads the OCI process spec of one more process for a container, whose first process is confined as within says. What the spec
// leaves out is as in the first process. The error is errdefs.ErrInvalidArgument, and names what the runtime cannot do: a process that would
// have more than the first one is refused.
func ParseExec(raw []byte, terminal bool, within *wire.Claim) (*wire.Exec, error) {
	var p specs.Process
	if err := json.Unmarshal(raw, &p); err != nil {
		return nil, fmt.Errorf("reading the OCI process spec: %w: %w", errdefs.ErrInvalidArgument, err)
	}
	switch {
	case p.SelinuxLabel != "":
		return nil, unsupported("SELinux labels")
	case p.IOPriority != nil || p.Scheduler != nil || p.ExecCPUAffinity != nil:
		return nil, unsupported("scheduling attributes")
	case p.CommandLine != "" || p.User.Username != "":
		return nil, unsupported("command lines and names of users")
	case len(p.Args) == 0 || p.Args[0] == "":
		return nil, unsupported("a process without a command")
	case !filepath.IsAbs(p.Cwd):
		return nil, unsupported("the working directory %q", p.Cwd)
	}
	e := &wire.Exec{}
	if terminal {
		e.Terminal = &wire.Terminal{}
		if size := p.ConsoleSize; size != nil {
			e.Terminal.Rows, e.Terminal.Columns = uint16(min(size.Height, math.MaxUint16)), uint16(min(size.Width, math.MaxUint16))
		}
	}
	p.Terminal = false // of the process alone; the rest is the same
	var err error
	if e.Claim, err = claim.FromSpec(&specs.Spec{Process: &p}); err != nil {
		return nil, err
	}
	if err := confine(e.Claim, p.Capabilities != nil, within); err != nil {
		return nil, err
	}
	if _, err := wire.EncodeExec(e); err != nil {
		return nil, fmt.Errorf("the process spec: %w", errors.Join(err, errdefs.ErrInvalidArgument))
	}
	return e, nil
}

// confine completes a process with the confinement of the first one, and refuses one that would have more.
func confine(c *wire.Claim, withCapabilities bool, within *wire.Claim) error {
	if !withCapabilities {
		c.Capabilities = within.Capabilities
	}
	bound := within.Capabilities.Bounding
	for _, set := range []uint64{c.Capabilities.Bounding, c.Capabilities.Effective, c.Capabilities.Permitted, c.Capabilities.Inheritable, c.Capabilities.Ambient} {
		if set&^bound != 0 {
			return unsupported("capabilities that the container does not have")
		}
	}
	for _, l := range c.Rlimits {
		if most, ok := limitOf(within, l.Resource); ok && (l.Hard > most.Hard || l.Soft > most.Hard) {
			return unsupported("limits above those of the container")
		}
	}
	for _, l := range within.Rlimits {
		if _, ok := limitOf(c, l.Resource); !ok {
			c.Rlimits = append(c.Rlimits, l)
		}
	}
	switch {
	case c.OOMScoreAdj == nil:
		c.OOMScoreAdj = within.OOMScoreAdj
	case within.OOMScoreAdj != nil && *c.OOMScoreAdj < *within.OOMScoreAdj:
		return unsupported("an oom_score_adj below that of the container")
	}
	if c.AppArmorProfile != "" && c.AppArmorProfile != within.AppArmorProfile {
		return unsupported("an AppArmor profile that is not the container's")
	}
	c.AppArmorProfile = within.AppArmorProfile
	c.NoNewPrivs = c.NoNewPrivs || within.NoNewPrivs
	c.Seccomp, c.SeccompFlags = within.Seccomp, within.SeccompFlags
	return nil
}

func limitOf(c *wire.Claim, resource uint32) (wire.Rlimit, bool) {
	i := slices.IndexFunc(c.Rlimits, func(l wire.Rlimit) bool { return l.Resource == resource })
	if i < 0 {
		return wire.Rlimit{}, false
	}
	return c.Rlimits[i], true
}
