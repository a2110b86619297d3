package recovery

import (
	"context"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// Load returns a sandbox whose spec and status are known: one that this process knows in outline alone is read from the API server. It
// returns false if the sandbox no longer exists.
func (r *Recoverer) Load(ctx context.Context, item store.Item) (store.Item, bool, error) {
	if !item.Outline {
		return item, true, nil
	}
	there, err := r.config.API.Lookup(ctx, item.Key, "")
	switch {
	case ctx.Err() != nil:
		return store.Item{}, false, fault.FromContext(ctx, "reading the sandbox from the API server", err)
	case err != nil:
		return store.Item{}, false, apiserver.Unavailable(err)
	case there == nil: // the watch has not said so yet
		return store.Item{}, false, nil
	case there.UID != item.Resource.UID:
		r.ResourceSeen(there)
	default:
		r.config.Store.Fill(there)
	}
	now, ok := r.config.Store.Get(item.Key)
	if ok && now.Outline {
		return store.Item{}, false, apiserver.Unavailable(nil)
	}
	return now, ok, nil
}
