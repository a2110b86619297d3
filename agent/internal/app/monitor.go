package app

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/apparmor"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/status"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

const (
	pingInterval   = time.Second
	pingTimeout    = 3 * time.Second
	relistInterval = 30 * time.Second
	// vanishInterval is how often ended sandboxes are compared with containerd's containers.
	vanishInterval = 10 * time.Second
	// lateTimeout bounds one search for containers that containerd completed late, with their removal.
	lateTimeout = 10 * time.Second
	// imageSettle collects the events of one pull.
	imageSettle = 20 * time.Millisecond
	// slowPings is how many pings in a row have to time out before containerd counts as lost: a node under load is slow, and
	// an agent that stops accepting sandboxes does not help. A containerd that refuses the connection is lost at once.
	slowPings = 3
)

// lateLooks are the pauses between adoption and the searches for what containerd completed late. What a killed process had
// asked for is done within milliseconds on a quiet node, and within seconds on a busy one.
var lateLooks = []time.Duration{time.Second, 4 * time.Second, 25 * time.Second}

// startRetries is the policy of adoption, imageRetries that of watching and listing images.
var (
	startRetries = backoff.Policy{Initial: 50 * time.Millisecond, Max: time.Second}
	imageRetries = backoff.Policy{Initial: time.Second, Max: 5 * time.Second}
)

// monitor adopts the sandboxes as soon as containerd answers, and from then on reports whether the agent accepts new ones
// and which images are on the node. While containerd is lost the agent accepts none and is not ready; its sandboxes run on. Where
// containerd answers, and the node lacks what new sandboxes need, the agent accepts none either, but is ready for all else that it does:
// otherwise the kubelet would restart it, and its report of the reason would be lost each time.
type monitor struct {
	runtime runtime.Runtime
	manager *sandbox.Manager
	status  *status.Hub
	ready   func(bool)
	clock   clock.WithTicker
	// adopted, if not nil, is called once the sandboxes are adopted.
	adopted func(context.Context)
	// apparmor, if not nil, returns whether sandboxes have the AppArmor profile.
	apparmor func() apparmor.Status
	// users, if not nil, returns whether sandboxes have user namespaces, and why not although their pool asks for them.
	users func() (on bool, offReason string)

	// accepting: new sandboxes are accepted. Only adopt, and then watchRuntime, use it.
	accepting bool
}

func (m *monitor) run(ctx context.Context) error {
	if !m.adopt(ctx) {
		return nil
	}
	if m.adopted != nil {
		m.adopted(ctx)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { m.watchImages(ctx) })
	wg.Go(func() { m.dropVanished(ctx) })
	wg.Go(func() { m.removeLate(ctx) })
	m.watchRuntime(ctx)
	return nil
}

// adopt retries until it succeeds; false means that ctx has ended. The images are read first, so that the first snapshot that
// a watcher receives is complete.
func (m *monitor) adopt(ctx context.Context) bool {
	log := logr.FromContextOrDiscard(ctx)
	last := ""
	var pinged error
	err := backoff.Retry(ctx, m.clock, startRetries, func(ctx context.Context) error {
		pinged = m.ping(ctx)
		err := pinged
		if cannotRun(err) {
			err = nil
		}
		if err == nil {
			err = m.relist(ctx)
		}
		if err == nil {
			err = m.manager.Adopt(ctx)
		}
		if err != nil && err.Error() != last && ctx.Err() == nil {
			last = err.Error()
			log.Info("waiting for containerd", obs.KeyError, last)
			m.manager.SetAccepting(false, reason(err))
		}
		return err
	})
	if err != nil {
		return false
	}
	if pinged != nil {
		log.Error(pinged, cannotRunMessage)
	}
	m.accepting = pinged == nil
	m.reportConfinement(ctx)
	m.manager.SetAccepting(m.accepting, reason(pinged))
	m.ready(true)
	return true
}

const cannotRunMessage = "the node lacks what new sandboxes need"

// cannotRun reports whether a ping has failed although containerd answers.
func cannotRun(err error) bool { return errdefs.IsFailedPrecondition(err) }

// reportConfinement reports whether sandboxes have the AppArmor profile and user namespaces, if that changed.
func (m *monitor) reportConfinement(ctx context.Context) {
	log := logr.FromContextOrDiscard(ctx)
	if m.apparmor != nil {
		s := m.apparmor()
		if m.status.SetAppArmor(&agentv1.AppArmorStatus{Profile: s.Profile, OffReason: s.Off}) {
			log.Info("AppArmor of sandboxes", obs.KeyName, s.Profile, obs.KeyReason, s.Off)
		}
	}
	if m.users != nil {
		if on, off := m.users(); m.status.SetUserNamespaces(on, off) {
			log.Info("user namespaces of sandboxes", obs.KeyUserNamespaces, on, obs.KeyReason, off)
		}
	}
}

func (m *monitor) watchRuntime(ctx context.Context) {
	log := logr.FromContextOrDiscard(ctx)
	ticker := m.clock.NewTicker(pingInterval)
	defer ticker.Stop()
	for slow := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
		err := m.ping(ctx)
		m.reportConfinement(ctx)
		if ctx.Err() != nil {
			return
		}
		if slow = countSlow(slow, err); m.accepting && slow > 0 && slow < slowPings {
			log.V(2).Info("containerd is slow", obs.KeyPings, slow)
			continue
		}
		was := m.accepting
		m.accepting = err == nil
		switch {
		case was && cannotRun(err):
			log.Error(err, cannotRunMessage)
		case was && err != nil:
			log.Error(err, "containerd lost; sandboxes run on")
		case !was && err == nil:
			log.Info("new sandboxes are accepted again")
		}
		m.manager.SetAccepting(m.accepting, reason(err))
		m.ready(err == nil || cannotRun(err))
	}
}

// countSlow returns how many pings in a row have timed out.
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

// watchImages lists the images at each change, and at intervals in case a change was missed.
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
		delays := backoff.New(m.clock, imageRetries)
		for ctx.Err() == nil {
			if err := m.runtime.WatchImages(ctx, touch); err != nil {
				log.V(2).Info("watching images failed; will retry", obs.KeyError, err.Error())
			}
			if delays.Wait(ctx) == nil {
				touch()
			}
		}
	})
	delays := backoff.New(m.clock, imageRetries)
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
		err := m.relist(ctx)
		if err == nil {
			delays.Reset()
			continue
		}
		if ctx.Err() == nil {
			log.V(2).Info("listing images failed; will retry", obs.KeyError, err.Error())
		}
		if delays.Wait(ctx) == nil {
			touch()
		}
	}
}

// dropVanished deletes, at intervals, sandboxes whose containers another component has removed.
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
			logr.FromContextOrDiscard(ctx).V(2).Info("dropping vanished sandboxes failed; will retry", obs.KeyError, err.Error())
		}
		cancel()
	}
}

// removeLate removes what containerd completed for an earlier process of the agent only after adoption.
func (m *monitor) removeLate(ctx context.Context) {
	for _, wait := range lateLooks {
		m.pause(ctx, wait)
		if ctx.Err() != nil {
			return
		}
		call, cancel := context.WithTimeout(ctx, lateTimeout)
		if err := m.manager.RemoveLate(call); err != nil && ctx.Err() == nil {
			logr.FromContextOrDiscard(ctx).Error(err, "looking for containers of an earlier agent process")
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

// pause waits for a duration, or for the end of ctx.
func (m *monitor) pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-m.clock.After(d):
	}
}

// reason returns the reason that the API reports while no sandboxes are accepted.
func reason(err error) string {
	switch {
	case err == nil:
		return ""
	case fault.ReasonOf(err) != "":
		return string(fault.ReasonOf(err)) + ": " + publicMessage(err)
	}
	return string(fault.RuntimeUnavailable) + ": containerd does not answer"
}

func publicMessage(err error) string {
	var f *fault.Error
	if errors.As(err, &f) {
		return f.Message()
	}
	return "unknown"
}
