package meter

import (
	"context"
	"maps"
	"time"
)

const (
	// sweepAge is how old the readings of a sweep may be.
	sweepAge = time.Second
	// maxDone is how many ended containers are remembered before a sweep drops them: without scrapes none would.
	maxDone = 1024
)

// sums are the counters of all sandboxes together. Those of one that has ended stay in them.
type sums struct {
	cpu      time.Duration
	oomKills int64
	// counted is what is in the sums already, of containers whose processes run.
	counted map[string]counted
	// done has the containers for which Ended was called, until they are no longer listed as running. They are counted.
	done map[string]struct{}
}

// counted are the counters of one container.
type counted struct {
	cpu      time.Duration
	oomKills int64
}

// add counts a reading of a container. What it had used before born, if it is older than that, is not counted. A counter that goes backwards, which the
// kernel's do not, neither is.
func (s *sums) add(c Container, r Reading, born time.Time) {
	var now counted
	if r.CPU.Total != nil {
		now.cpu = *r.CPU.Total
	}
	if r.Memory.OOMKills != nil {
		now.oomKills = *r.Memory.OOMKills
	}
	before, known := s.counted[c.ID]
	if !known && c.Started.Before(born) {
		before = now
	}
	now = counted{max(now.cpu, before.cpu), max(now.oomKills, before.oomKills)}
	s.cpu += now.cpu - before.cpu
	s.oomKills += now.oomKills - before.oomKills
	s.counted[c.ID] = now
}

// Ended counts what a container has used whose process has ended, and forgets it. Its cgroup should still exist.
func (m *Meter) Ended(ctx context.Context, c Container) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	u, err := m.config.Runtime.Usage(ctx, c.ID, false) // its network is not needed, so that no caller gets this reading
	last := Reading{u, m.config.Clock.Now()}
	m.mu.Lock()
	if _, repeated := m.sums.done[c.ID]; err == nil && !repeated {
		m.sums.add(c, last, m.born)
		if last.Memory.Peak != nil {
			m.metrics.peak.Observe(float64(*last.Memory.Peak))
		}
	}
	delete(m.sums.counted, c.ID)
	delete(m.readings, c.ID)
	m.sums.done[c.ID] = struct{}{}
	full := len(m.sums.done) > maxDone
	m.mu.Unlock()
	if full {
		m.sweep(ctx)
	}
}

// totals are the sums, and what the containers use now.
type totals struct {
	sums
	workingSet, processes int64
}

// sweep reads all running containers and adds them up.
func (m *Meter) sweep(ctx context.Context) totals {
	m.sweeping.Lock()
	defer m.sweeping.Unlock()
	m.mu.Lock()
	before := maps.Clone(m.sums.done)
	m.mu.Unlock()
	running, readings := m.config.Running(), map[string]Reading{}
	listed := map[string]struct{}{}
	for _, c := range running {
		listed[c.ID] = struct{}{}
		if r, err := m.Read(ctx, c, sweepAge); err == nil {
			readings[c.ID] = r
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var t totals
	for _, c := range running {
		r, ok := readings[c.ID]
		if _, done := m.sums.done[c.ID]; done || !ok {
			continue
		}
		m.sums.add(c, r, m.born)
		if r.Memory.WorkingSet != nil {
			t.workingSet += *r.Memory.WorkingSet
		}
		if r.PIDs.Current != nil {
			t.processes += *r.PIDs.Current
		}
	}
	m.forget(before, listed)
	t.sums = sums{cpu: m.sums.cpu, oomKills: m.sums.oomKills}
	return t
}

// forget drops what is kept of containers that do not run. before are those that had ended when the running ones were listed. mu is held.
func (m *Meter) forget(before, listed map[string]struct{}) {
	for id := range before {
		if _, ok := listed[id]; !ok {
			delete(m.sums.done, id)
		}
	}
	for id, r := range m.readings {
		if _, ok := listed[id]; !ok && m.config.Clock.Since(r.At) > sweepAge {
			delete(m.readings, id)
		}
	}
}
