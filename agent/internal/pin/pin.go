// Package pin keeps images on the agent's node: those that the agent's pool lists, which it pulls ahead, and those that
// sandboxes use, against the kubelet's image garbage collection. It owns the durable list and the pulls ahead; how an
// image is pulled and protected is the runtime's business. All methods of Keeper may be called concurrently.
//
//	         Set             pulled and protected
//	(none) -------> PULLING ----------------------> READY
//	                 ^  |  ^                          |
//	                 |  |  +--- gone from the node ---+
//	                 |  | pull failed
//	                 |  v
//	                FAILED   pulled again with backoff, reported FAILED until a pull succeeds
//
// Lock order: writing, then mu, then the lock of what Publish calls. mu is never held over I/O.
package pin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

const (
	// file holds the list, a JSON array of references.
	file = "pinned-images"
	// checkInterval is how often the images on the node are compared with the list.
	checkInterval = 30 * time.Second
	checkTimeout  = 10 * time.Second
	// checkRetry follows a check that failed because the runtime did not answer.
	checkRetry = time.Second
	// parallelPulls bounds the pulls ahead that run at a time, so that they leave bandwidth to creates.
	parallelPulls = 2
)

// pullRetries is the policy of an image whose pull fails.
var pullRetries = backoff.Policy{Initial: time.Second, Max: 5 * time.Minute}

const (
	statePulling = agentv1.PinnedImageState_PINNED_IMAGE_STATE_PULLING
	stateReady   = agentv1.PinnedImageState_PINNED_IMAGE_STATE_READY
	stateFailed  = agentv1.PinnedImageState_PINNED_IMAGE_STATE_FAILED
)

// Runtime is the part of runtime.Runtime that a Keeper needs.
type Runtime interface {
	// Images returns the images on the node.
	Images(ctx context.Context) ([]string, error)
	// Pull pulls an image.
	Pull(ctx context.Context, ref string, progress func(runtime.Progress)) (string, error)
	// PinImages protects the listed images and those in use.
	PinImages(ctx context.Context, listed []string) error
}

// Files keeps files durably; state.Dir implements it.
type Files interface {
	// Read returns a file, or nil without an error if there is none.
	Read(name string) ([]byte, error)
	// Write creates or replaces a file. Once it has returned, the file is durable.
	Write(name string, data []byte) error
}

// Config is what a Keeper needs.
type Config struct {
	// Runtime pulls and protects the images.
	Runtime Runtime
	// Files keeps the list.
	Files Files
	// Publish receives the state of all listed images whenever one may have changed. It must return at once.
	Publish func([]*agentv1.PinnedImage)
	// Clock; nil is the real one.
	Clock clock.WithTicker
}

// Keeper keeps the images of one agent. Make it with Open; Run does its work.
type Keeper struct {
	config Config
	clock  clock.WithTicker
	wake   chan struct{}
	wg     sync.WaitGroup // pulls

	writing sync.Mutex // orders the writes of the file

	mu     sync.Mutex
	images []*image
	pulls  int
}

// image is one listed image. The keeper's lock guards it.
type image struct {
	ref     string // as listed
	name    string // normalized; empty if ref is invalid
	state   agentv1.PinnedImageState
	message string
	// due is when the image may be pulled again; delays are the delays between pulls.
	due    time.Time
	delays *backoff.Backoff
	// cancel ends the pull that runs; nil if none does.
	cancel context.CancelFunc
}

// Open reads the list that an earlier agent process kept. A list that cannot be read is an error.
func Open(cfg Config) (*Keeper, error) {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	k := &Keeper{config: cfg, clock: cfg.Clock, wake: make(chan struct{}, 1)}
	raw, err := cfg.Files.Read(file)
	if err != nil {
		return nil, fmt.Errorf("reading the list of pinned images: %w", err)
	}
	if raw != nil {
		var refs []string
		if err := json.Unmarshal(raw, &refs); err != nil {
			return nil, fmt.Errorf("reading the list of pinned images: %w", err)
		}
		k.replace(refs)
	}
	return k, nil
}

// Set replaces the list, durably, and returns without waiting for pulls. An image that is no longer listed is kept only
// while a sandbox uses it. Unavailable: the list could not be made durable, and the old one stays in force. Safe to repeat.
func (k *Keeper) Set(refs []string) error {
	raw, err := json.Marshal(refs)
	if err != nil {
		return fmt.Errorf("encoding the list of pinned images: %w", err)
	}
	k.writing.Lock()
	defer k.writing.Unlock()
	if err := k.config.Files.Write(file, raw); err != nil {
		return fault.Wrap(err, errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent cannot keep its state on the disk")
	}
	k.replace(refs)
	return nil
}

// replace puts a list into force. Images that stay keep their state.
func (k *Keeper) replace(refs []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var next []*image
	for _, ref := range refs {
		byRef := func(i *image) bool { return i.ref == ref }
		if slices.ContainsFunc(next, byRef) {
			continue
		}
		if at := slices.IndexFunc(k.images, byRef); at >= 0 {
			next = append(next, k.images[at])
			continue
		}
		next = append(next, k.newImage(ref))
	}
	for _, i := range k.images {
		if i.cancel != nil && !slices.Contains(next, i) {
			i.cancel()
		}
	}
	k.images = next
	k.publish()
	k.poke()
}

func (k *Keeper) newImage(ref string) *image {
	i := &image{ref: ref, state: statePulling, delays: backoff.New(k.clock, pullRetries)}
	name, err := runtime.NormalizeImage(ref)
	if err != nil {
		i.state, i.message = stateFailed, publicMessage(err)
	}
	i.name = name
	return i
}

// publish is called with mu held.
func (k *Keeper) publish() {
	var out []*agentv1.PinnedImage
	for _, i := range k.images {
		out = append(out, &agentv1.PinnedImage{Image: i.ref, State: i.state, Message: i.message})
	}
	k.config.Publish(out)
}

func (k *Keeper) poke() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// Run pulls and protects images until ctx ends.
func (k *Keeper) Run(ctx context.Context) error {
	defer k.wg.Wait()
	for {
		wait := k.check(ctx)
		timer := k.clock.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-k.wake:
			timer.Stop()
		case <-timer.C():
		}
	}
}

// check compares the images on the node with the list, protects what is there, begins to pull what is missing, and returns
// when to check again.
func (k *Keeper) check(ctx context.Context) time.Duration {
	log := logr.FromContextOrDiscard(ctx)
	call, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	present, err := k.config.Runtime.Images(call)
	if err == nil {
		err = k.config.Runtime.PinImages(call, k.names())
	}
	if err != nil {
		if ctx.Err() == nil {
			log.V(2).Info("checking pinned images failed; will retry", obs.KeyError, err.Error())
		}
		return checkRetry
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	next, now := checkInterval, k.clock.Now()
	for _, i := range k.images {
		switch {
		case i.name == "" || i.cancel != nil:
		case slices.Contains(present, i.name):
			i.state, i.message, i.due = stateReady, "", time.Time{}
			i.delays.Reset()
		case now.Before(i.due):
			next = min(next, i.due.Sub(now))
		case k.pulls < parallelPulls && ctx.Err() == nil:
			k.pull(ctx, i)
		}
	}
	k.publish()
	return next
}

// names returns the normalized names of the listed images.
func (k *Keeper) names() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var names []string
	for _, i := range k.images {
		if i.name != "" {
			names = append(names, i.name)
		}
	}
	return names
}

// pull begins to pull an image. mu is held.
func (k *Keeper) pull(ctx context.Context, i *image) {
	if i.state == stateReady {
		i.state = statePulling
	}
	ctx, i.cancel = context.WithCancel(ctx)
	k.pulls++
	k.wg.Go(func() {
		_, err := k.config.Runtime.Pull(ctx, i.name, nil)
		if ctx.Err() != nil {
			err = nil // the image is no longer listed, or the agent is stopping
		}
		if err != nil {
			logr.FromContextOrDiscard(ctx).Info("pulling pinned image failed; will retry", obs.KeyImage, i.name, obs.KeyError, err.Error())
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		i.cancel()
		i.cancel = nil
		k.pulls--
		// Also after a success: an image that is gone again at once is not pulled in a loop. The next check sees it.
		i.due = k.clock.Now().Add(i.delays.Next())
		if err != nil {
			i.state, i.message = stateFailed, publicMessage(err)
		}
		k.publish()
		k.poke()
	})
}

// publicMessage returns the part of an error that any caller may see.
func publicMessage(err error) string {
	var f *fault.Error
	if errors.As(err, &f) {
		return f.Message()
	}
	return "the agent's log has the error"
}
