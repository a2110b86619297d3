package create

import (
	"context"
	"errors"
	"time"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// nameTimeout is how long a create waits for the end of a deletion under the same name. A caller that saw the old sandbox's
// end by another way (kubectl, an agent) comes a moment before this process has, and should not be refused for that.
const nameTimeout = 2 * time.Second

// errSameRequest is returned for a name whose sandbox was made by the same request.
var errSameRequest = errors.New("the sandbox of this request exists")

// lockName locks a free name. One whose sandbox is being deleted is waited for, briefly; one that is taken is
// SANDBOX_EXISTS.
func (c *Creator) lockName(ctx context.Context, k *call) error {
	_, watch := c.config.Store.Watch(store.Filter{Namespace: k.name.Namespace, Name: k.name.Name})
	defer watch.Close()
	timer := c.config.Clock.NewTimer(nameTimeout)
	defer timer.Stop()
	for {
		unlock, err := c.config.Names.Lock(ctx, k.name)
		if err != nil {
			return fault.FromContext(ctx, "waiting for other work on the sandbox", nil)
		}
		item, taken := c.config.Store.Get(k.name)
		if !taken {
			k.unlock = unlock
			return nil
		}
		unlock() // the deletion may need it
		switch id := k.plan.Request.GetRequestId(); {
		case item.Sandbox.GetDeleteTime() != nil:
		case id != "" && id == item.RequestID:
			return errSameRequest
		default:
			return nameTaken(k.name, "exists")
		}
		select {
		case _, ok := <-watch.Events(): // whatever it says: look again
			if !ok {
				return nameTaken(k.name, "changes too fast")
			}
		case <-timer.C():
			return nameTaken(k.name, "is still being deleted")
		case <-ctx.Done():
			return fault.FromContext(ctx, "waiting for the end of a deletion", nil)
		}
	}
}

// unlockName releases the name, if it is locked.
func (c *Creator) unlockName(_ context.Context, k *call) error {
	k.releaseName()
	return nil
}

func (k *call) releaseName() {
	if k.unlock != nil {
		k.unlock()
		k.unlock = nil
	}
}

func nameTaken(name store.Key, state string) error {
	return fault.New(errdefs.ErrAlreadyExists, fault.SandboxExists, "sandbox %s %s", name, state).With("sandbox", name.String())
}
