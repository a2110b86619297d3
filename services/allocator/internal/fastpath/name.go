package fastpath

import (
	"context"
	"time"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// nameWait is how long a create waits for the end of a deletion under the same name. Who saw the old sandbox's end by
// another way (kubectl, an agent) comes a moment before this process has, and should not be refused for that.
const nameWait = 2 * time.Second

// lockName locks a free name. One whose sandbox is being deleted is waited for, briefly; one that is taken is
// SANDBOX_EXISTS.
func (s *Server) lockName(ctx context.Context, key store.Key) (func(), error) {
	_, watch := s.store.Watch(store.Filter{Namespace: key.Namespace, Name: key.Name})
	defer watch.Close()
	timer := s.config.Clock.NewTimer(nameWait)
	defer timer.Stop()
	for {
		unlock, err := s.locks.Lock(ctx, key)
		if err != nil {
			return nil, errContext(ctx, "waiting for other work on the sandbox", nil)
		}
		item, taken := s.store.Get(key)
		if !taken {
			return unlock, nil
		}
		unlock() // the deletion may need it
		if item.Sandbox.GetDeleteTime() == nil {
			return nil, errTaken(key, "exists")
		}
		select {
		case _, ok := <-watch.Events(): // whatever it says: look again
			if !ok {
				return nil, errTaken(key, "changes too fast")
			}
		case <-timer.C():
			return nil, errTaken(key, "is still being deleted")
		case <-ctx.Done():
			return nil, errContext(ctx, "waiting for the end of a deletion", nil)
		}
	}
}

func errTaken(key store.Key, state string) error {
	return fault.New(errdefs.ErrAlreadyExists, fault.SandboxExists, "sandbox %s %s", key, state).With("sandbox", key.String())
}
