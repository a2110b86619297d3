package usage

import (
	"strconv"
	"strings"
	"time"
)

// unlimited is what a legacy limit is at least if there is none: the largest number of bytes in whole pages, whatever the size of a page.
const unlimited = 1<<63 - 1<<20

// tick is the unit of cpuacct.stat: USER_HZ, which is 100 on all architectures that Go supports.
const tick = 10 * time.Millisecond

// legacy reads a cgroup of the legacy hierarchies.
func legacy(f *files) Usage {
	var u Usage
	u.CPU.Total = nanoseconds(f.number("cpuacct", "cpuacct.usage"))
	u.CPU.User, u.CPU.System = nanoseconds(f.number("cpuacct", "cpuacct.usage_user")), nanoseconds(f.number("cpuacct", "cpuacct.usage_sys"))
	if u.CPU.User == nil || u.CPU.System == nil {
		stat := f.fields("cpuacct", "cpuacct.stat")
		u.CPU.User, u.CPU.System = times(f.field(stat, "user"), tick), times(f.field(stat, "system"), tick)
	}
	throttling := f.fields("cpu", "cpu.stat")
	u.CPU.Throttled, u.CPU.ThrottledPeriods = nanoseconds(f.field(throttling, "throttled_time")), f.field(throttling, "nr_throttled")
	if quota := f.number("cpu", "cpu.cfs_quota_us"); quota != nil && *quota > 0 {
		u.CPU.LimitMillis = millis(quota, f.number("cpu", "cpu.cfs_period_us"))
	}

	u.Memory.Usage, u.Memory.Peak = f.number("memory", "memory.usage_in_bytes"), f.number("memory", "memory.max_usage_in_bytes")
	u.Memory.WorkingSet = without(u.Memory.Usage, f.field(f.fields("memory", "memory.stat"), "total_inactive_file"))
	if limit := f.number("memory", "memory.limit_in_bytes"); limit != nil && *limit < unlimited {
		u.Memory.Limit = limit
	}
	u.Memory.OOMKills = f.field(f.fields("memory", "memory.oom_control"), "oom_kill")

	u.PIDs = PIDs{Current: f.number("pids", "pids.current"), Limit: f.number("pids", "pids.max")}
	u.IO = f.legacyIO()
	return u
}

// legacyIO reads the counters of the block devices; nil if they are not counted.
func (f *files) legacyIO() *IO {
	moved, ok := f.read("blkio", "blkio.throttle.io_service_bytes_recursive")
	done, alsoOK := f.read("blkio", "blkio.throttle.io_serviced_recursive")
	if !ok || !alsoOK {
		return nil
	}
	var io IO
	f.addLegacy(moved, &io.ReadBytes, &io.WrittenBytes)
	f.addLegacy(done, &io.Reads, &io.Writes)
	return &io
}

// addLegacy adds up lines such as `8:0 Read 4096`. Others, such as `Total 4096`, repeat what these have.
func (f *files) addLegacy(raw string, reads, writes *int64) {
	for line := range strings.Lines(raw) {
		words := strings.Fields(line)
		if len(words) != 3 {
			continue
		}
		to := map[string]*int64{"Read": reads, "Write": writes}[words[1]]
		if to == nil {
			continue
		}
		if n := f.parse("blkio.throttle", words[2]); n != nil {
			*to += *n
		}
	}
}

// number reads a decimal number. One beyond 64 bits with a sign is the largest.
func number(text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err == nil {
		return n, nil
	}
	if _, unsigned := strconv.ParseUint(text, 10, 64); unsigned == nil {
		return n, nil
	}
	return 0, err
}

// nanoseconds returns a duration; nil for nil.
func nanoseconds(n *int64) *time.Duration { return times(n, time.Nanosecond) }

// times returns a duration in units; nil for nil.
func times(n *int64, unit time.Duration) *time.Duration {
	if n == nil {
		return nil
	}
	d := time.Duration(*n) * unit
	return &d
}

// millis returns a limit in thousandths of a processor; nil if it is not known.
func millis(quota, period *int64) *int64 {
	if quota == nil || period == nil || *period <= 0 {
		return nil
	}
	n := *quota * 1000 / *period
	return &n
}

// without returns memory without a part of it; nil if either is not known.
func without(usage, part *int64) *int64 {
	if usage == nil || part == nil {
		return nil
	}
	n := max(*usage-*part, 0) // they are not read at the same time
	return &n
}
