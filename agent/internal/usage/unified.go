package usage

import (
	"strings"
	"time"
)

// unified reads a cgroup of the unified hierarchy.
func unified(f *files) Usage {
	var u Usage
	stat := f.fields("", "cpu.stat")
	u.CPU = CPU{
		Total: times(f.field(stat, "usage_usec"), time.Microsecond), User: times(f.field(stat, "user_usec"), time.Microsecond),
		System: times(f.field(stat, "system_usec"), time.Microsecond), Throttled: times(f.field(stat, "throttled_usec"), time.Microsecond),
		ThrottledPeriods: f.field(stat, "nr_throttled"),
	}
	if limit, ok := f.read("", "cpu.max"); ok {
		u.CPU.LimitMillis = f.cpuMax(limit)
	}

	u.Memory = Memory{
		Usage: f.number("", "memory.current"), Peak: f.number("", "memory.peak"), Limit: f.number("", "memory.max"),
		OOMKills: f.field(f.fields("", "memory.events"), "oom_kill"),
	}
	u.Memory.WorkingSet = without(u.Memory.Usage, f.field(f.fields("", "memory.stat"), "inactive_file"))

	u.PIDs = PIDs{Current: f.number("", "pids.current"), Limit: f.number("", "pids.max")}
	if raw, ok := f.read("", "io.stat"); ok {
		u.IO = f.unifiedIO(raw)
	}
	return u
}

// cpuMax reads `QUOTA PERIOD`, where the quota is `max` if there is no limit.
func (f *files) cpuMax(raw string) *int64 {
	quota, period, ok := strings.Cut(strings.TrimSpace(raw), " ")
	if !ok || quota == "max" {
		return nil
	}
	return millis(f.parse("cpu.max", quota), f.parse("cpu.max", period))
}

// unifiedIO adds up lines such as `8:0 rbytes=4096 wbytes=0 rios=1 wios=0 dbytes=0 dios=0`. A device without any may have no figures.
func (f *files) unifiedIO(raw string) *IO {
	var io IO
	to := map[string]*int64{"rbytes": &io.ReadBytes, "wbytes": &io.WrittenBytes, "rios": &io.Reads, "wios": &io.Writes}
	for line := range strings.Lines(raw) {
		for _, word := range strings.Fields(line) {
			key, value, _ := strings.Cut(word, "=")
			if to[key] == nil {
				continue
			}
			if n := f.parse("io.stat", value); n != nil {
				*to[key] += *n
			}
		}
	}
	return &io
}
