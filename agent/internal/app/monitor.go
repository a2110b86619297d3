package app

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/status"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	pingInterval   = time.Second
	pingTimeout    = 3 * time.Second
	startRetry     = 50 * time.Millisecond
	relistInterval = 30 * time.Second
	// vanishInterval is how often sandboxes that have ended are held against containerd's containers.
	vanishInterval = 10 * time.Second
	// imageSettle gathers the several events that one pull makes.
	imageSettle = 20 * time.Millisecond
	imageRetry  = time.Second
	// slowPings is how many pings in a row have to time out before containerd counts as lost: a node under load is slow,
	// and an agent that comes and goes makes it no faster. One that refuses the connection is lost at once.
	slowPings = 3
)

// monitor adopts the sandboxes as soon as containerd answers, and from then on says whether the agent takes new ones and
// which images it has. Losing containerd makes the agent take none; its sandboxes go on.
type monitor struct {
	runtime runtime.Runtime
	manager *sandbox.Manager
	status  *status.Hub
	ready   func(bool)
	clock   clock.WithTicker
}

func (m *monitor) run(ctx context.Context) error {
	if !m.adopt(ctx) {
		return nil
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { m.watchImages(ctx) })
	wg.Go(func() { m.dropVanished(ctx) })
	m.watchRuntime(ctx)
	return nil
}

// adopt tries until it succeeds; false means that ctx has ended. The images are read first, so that the first snapshot
// that anyone sees is whole.
func (m *monitor) adopt(ctx context.Context) bool {
	log := logr.FromContextOrDiscard(ctx)
	last := ""
	for {
		err := m.ping(ctx)
		if err == nil {
			err = m.relist(ctx)
		}
		if err == nil {
			err = m.manager.Adopt(ctx)
		}
		if err == nil {
			m.manager.SetAccepting(true, "")
			m.ready(true)
			return true
		}
		if text := err.Error(); text != last && ctx.Err() == nil {
			last = text
			log.Info("waiting for containerd", "err", text)
			m.manager.SetAccepting(false, reason(err))
		}
		select {
		case <-ctx.Done():
			return false
		case <-m.clock.After(startRetry):
		}
	}
}

func (m *monitor) watchRuntime(ctx context.Context) {
	log := logr.FromContextOrDiscard(ctx)
	ticker := m.clock.NewTicker(pingInterval)
	defer ticker.Stop()
	for was, slow := true, 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
		err := m.ping(ctx)
		if ctx.Err() != nil {
			return
		}
		if slow = countSlow(slow, err); was && slow > 0 && slow < slowPings {
			log.V(2).Info("containerd is slow", "pings", slow)
			continue
		}
		switch {
		case err != nil && was:
			log.Error(err, "containerd is lost; sandboxes go on")
		case err == nil && !was:
			log.Info("containerd is back")
		}
		was = err == nil
		m.manager.SetAccepting(was, reason(err))
		m.ready(was)
	}
}

// countSlow is how many pings in a row have timed out.
func countSlow(before int, err error) int {
	if errors.Is(err, context.DeadlineExceeded) {
		return before + 1
	}
	return 0
}

func (m *monitor) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	return m.runtime.Ping(ctx)
}

// watchImages lists the images at each change, and now and then in case a change was missed.
func (m *monitor) watchImages(ctx context.Context) {
	log := logr.FromContextOrDiscard(ctx)
	dirty := make(chan struct{}, 1)
	touch := func() {
		select {
		case dirty <- struct{}{}:
		default:
		}
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for ctx.Err() == nil {
			if err := m.runtime.WatchImages(ctx, touch); err != nil {
				log.V(2).Info("watching images; trying on", "err", err.Error())
			}
			m.pause(ctx, imageRetry)
			touch()
		}
	})
	ticker := m.clock.NewTicker(relistInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-dirty:
			m.pause(ctx, imageSettle)
		case <-ticker.C():
		}
		if err := m.relist(ctx); err != nil && ctx.Err() == nil {
			log.V(2).Info("listing images", "err", err.Error())
			m.pause(ctx, imageRetry)
			touch()
		}
	}
}

// dropVanished gives back, now and then, the places of sandboxes whose containers somebody else has removed.
func (m *monitor) dropVanished(ctx context.Context) {
	ticker := m.clock.NewTicker(vanishInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
		call, cancel := context.WithTimeout(ctx, vanishInterval)
		if err := m.manager.DropVanished(call); err != nil && ctx.Err() == nil {
			logr.FromContextOrDiscard(ctx).V(2).Info("looking for sandboxes without a container", "err", err.Error())
		}
		cancel()
	}
}

func (m *monitor) relist(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	images, err := m.runtime.Images(ctx)
	if err != nil {
		return err
	}
	m.status.SetImages(images)
	return nil
}

func (m *monitor) pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-m.clock.After(d):
	}
}

// reason is what the API tells of why no sandboxes are taken.
func reason(err error) string {
	switch {
	case err == nil:
		return ""
	case fault.ReasonOf(err) != "":
		return string(fault.ReasonOf(err)) + ": " + publicText(err)
	}
	return string(fault.RuntimeUnavailable) + ": containerd does not answer"
}

func publicText(err error) string {
	var f *fault.Error
	if errors.As(err, &f) {
		return f.Message()
	}
	return "unknown"
}
