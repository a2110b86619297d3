package ctrd

import (
	"errors"
	"path/filepath"
	"sync"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/apparmor"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// confinement is whether sandboxes have the AppArmor profile.
type confinement struct {
	mu     sync.Mutex
	status apparmor.Status
}

func (c *confinement) get() apparmor.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.status
}

func (c *confinement) set(s apparmor.Status) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status = s
}

// profile returns the profile for the next sandbox; empty for none.
func (c *confinement) profile() string { return c.get().Profile }

// observe looks at the error of a claim. If it says that the kernel no longer has the profile, further sandboxes run without: they
// would fail as well until a shim is started that loads it again.
func (c *confinement) observe(err error) {
	var f *claim.Failure
	if errors.As(err, &f) && f.Stage == wire.StageAppArmor {
		c.set(apparmor.Status{Off: "a sandbox could not be given the profile: " + f.Error()})
	}
}

// AppArmor returns whether sandboxes have the AppArmor profile. With the handler fsb that is known once a shim has been started.
func (r *Runtime) AppArmor() apparmor.Status { return r.confinement.get() }

// shimStarted reads what the shim that was started last has found out about its host.
func (c *confinement) shimStarted(binary string) { c.set(apparmor.Read(filepath.Dir(binary))) }
