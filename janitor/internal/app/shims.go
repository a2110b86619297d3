package app

import (
	"context"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/shim"
)

// collectShims removes, at intervals, the installed versions of our shim that nothing uses any longer.
func collectShims(ctx context.Context, collector *shim.Collector, interval time.Duration, c clock.WithTicker) error {
	log := logr.FromContextOrDiscard(ctx)
	ticker := c.NewTicker(interval)
	defer ticker.Stop()
	for {
		removed, err := collector.Collect(ctx)
		for _, version := range removed {
			log.Info("removed a version of the shim that is not in use", obs.KeyName, version)
		}
		if err != nil && ctx.Err() == nil {
			log.Info("looking for versions of the shim that are not in use failed; will retry", obs.KeyError, err.Error())
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
	}
}
