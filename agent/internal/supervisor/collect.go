package supervisor

import (
	"runtime"
	"runtime/metrics"
)

// collector collects unused memory, which the Go runtime does not do by itself here. It does it in a goroutine of its own: the supervisor's is locked
// to its thread, and would hand the processor to another thread and back for each bit of memory that is swept. A thread that is about to become idle
// just then is none yet, and the runtime would make one more, which it may not get.
type collector struct {
	turn      chan struct{}
	allocated []metrics.Sample // of one
	before    uint64           // what was allocated when unused memory was collected
}

func newCollector() *collector {
	c := &collector{turn: make(chan struct{}), allocated: []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}}
	go func() {
		for range c.turn {
			runtime.GC()
			c.turn <- struct{}{}
		}
	}()
	return c
}

// collect collects when enough was allocated.
func (c *collector) collect() {
	metrics.Read(c.allocated)
	now := c.allocated[0].Value.Uint64()
	if now-c.before < garbageLimit {
		return
	}
	c.before = now
	c.turn <- struct{}{}
	<-c.turn
}
