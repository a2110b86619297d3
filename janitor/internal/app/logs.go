package app

import (
	"context"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// trimInterval is how often the logs are checked. In between, a log may grow beyond its bound.
const trimInterval = time.Second

// trimLogs bounds the output of sandboxes whose agents do not: they run on while their agent is restarted, and after its Pod is gone
// until they are deleted.
func trimLogs(ctx context.Context, root string, c clock.WithTicker) error {
	log := logr.FromContextOrDiscard(ctx)
	ticker := c.NewTicker(trimInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
		trimmed, err := ctrd.TrimLogs(root)
		for _, id := range trimmed {
			log.V(2).Info("trimmed a log that its agent does not bound", obs.KeyContainer, id)
		}
		if err != nil {
			log.V(2).Info("trimming logs failed; will retry", obs.KeyError, err.Error())
		}
	}
}
