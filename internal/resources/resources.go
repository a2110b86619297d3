// Package resources has the rules for the limits of a sandbox's cgroup: which of them are in force, and which exceed what its
// pool allows. It is pure: the components convert what they read, and apply the result.
package resources

import (
	"fmt"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Limits are the limits of one sandbox, or the bounds of a pool for them. Zero, or less: not set.
type Limits struct {
	// CPUMillis is CPU time in thousandths of a core, MemoryBytes memory (swap included), PIDs processes and threads.
	CPUMillis, MemoryBytes, PIDs int64
}

// Defaults are in force where neither the sandbox nor its pool sets a limit. A sandbox is never unlimited: a fork bomb or a memory
// leak in it must not reach its neighbors.
func Defaults() Limits { return Limits{CPUMillis: 1000, MemoryBytes: 512 << 20, PIDs: 1024} }

// Effective returns the limits in force of a sandbox: what it asks for, or else the default of its pool, or else Defaults. A
// default is lowered to the pool's maximum; for what the sandbox asks for there is Check.
func (l Limits) Effective(pool, maximum Limits) Limits {
	d := Defaults()
	return Limits{
		CPUMillis:   effective(l.CPUMillis, pool.CPUMillis, d.CPUMillis, maximum.CPUMillis),
		MemoryBytes: effective(l.MemoryBytes, pool.MemoryBytes, d.MemoryBytes, maximum.MemoryBytes),
		PIDs:        effective(l.PIDs, pool.PIDs, d.PIDs, maximum.PIDs),
	}
}

func effective(own, pool, fallback, maximum int64) int64 {
	if own > 0 {
		return own
	}
	if pool > 0 {
		fallback = pool
	}
	if maximum > 0 {
		fallback = min(fallback, maximum)
	}
	return fallback
}

// Check returns an InvalidField error that names each limit above the maximum, as a field of the message at prefix
// (`spec.resources`).
func (l Limits) Check(prefix string, maximum Limits) error {
	var found []fault.Violation
	check := func(field string, value, most int64) {
		if most > 0 && value > most {
			found = append(found, fault.Violation{Field: prefix + "." + field, Message: fmt.Sprintf("%d exceeds the pool's maximum of %d", value, most)})
		}
	}
	check("cpu_millis", l.CPUMillis, maximum.CPUMillis)
	check("memory_bytes", l.MemoryBytes, maximum.MemoryBytes)
	check("pids", l.PIDs, maximum.PIDs)
	if len(found) == 0 {
		return nil
	}
	return fault.Fields(found[0], found[1:]...)
}
