package ctrd

import (
	"sync"
	"time"

	"k8s.io/utils/clock"
)

// probeInterval is how long a failure stands before it is tried again.
const probeInterval = 30 * time.Second

// probe is what the node was found to be able to do. A success stays. A failure may have been a passing one, such as a lack of memory or of
// descriptors, and stands until it is tried again.
type probe struct {
	try   func() error
	clock clock.PassiveClock

	first sync.Once
	// trying orders the further tries; mu is never held over one.
	trying sync.Mutex

	mu     sync.Mutex
	failed error
	at     time.Time
}

// result returns the error of the last try. The first call tries.
func (p *probe) result() error {
	p.first.Do(p.run)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failed
}

// recheck is result, but tries again if the last try has failed and is old enough.
func (p *probe) recheck() error {
	p.first.Do(p.run)
	if p.trying.TryLock() {
		defer p.trying.Unlock()
		if p.due() {
			p.run()
		}
	}
	return p.result()
}

func (p *probe) due() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failed != nil && p.clock.Since(p.at) >= probeInterval
}

func (p *probe) run() {
	err := p.try()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed, p.at = err, p.clock.Now()
}
