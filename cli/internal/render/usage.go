package render

import (
	"fmt"
	"strconv"
	"time"

	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
)

// Used is what a sandbox uses.
type Used struct {
	*usagev1.SandboxUsage

	// Cores is how many processors it used on average between two readings; nil without a second reading.
	Cores *float64
}

// Usage returns a table of what sandboxes use. What is not known is None.
func Usage(columns Columns, list []Used, now time.Time) *Table {
	header := []string{"NAME", "CPU", "MEMORY", "PEAK", "PROCESSES", "AGE"}
	if columns.Wide {
		header = append(header, "CPU-LIMIT", "CPU-TIME", "THROTTLED", "MEMORY-LIMIT", "OOM-KILLS", "READ", "WRITTEN", "RECEIVED", "SENT", "DISK", "POOL")
	}
	if columns.Namespace {
		header = append([]string{"NAMESPACE"}, header...)
	}
	t := NewTable(header...)
	for _, u := range list {
		row := []string{
			u.GetName(), cores(u.Cores), optionalSize(u.GetMemory().WorkingSetBytes), optionalSize(u.GetMemory().PeakBytes),
			optionalNumber(u.GetProcesses().Current), Age(u.GetStartTime().AsTime(), now),
		}
		if columns.Wide {
			row = append(row, wideUsage(u.SandboxUsage)...)
		}
		if columns.Namespace {
			row = append([]string{u.GetNamespace()}, row...)
		}
		t.Add(row...)
	}
	return t
}

func wideUsage(u *usagev1.SandboxUsage) []string {
	var limit *float64
	if u.GetCpu().LimitMillis != nil {
		n := float64(u.GetCpu().GetLimitMillis()) / 1000
		limit = &n
	}
	row := []string{
		cores(limit), "", "", optionalSize(u.GetMemory().LimitBytes), optionalNumber(u.GetMemory().OomKills), "", "", "", "", "", u.GetPool(),
	}
	if d := u.GetCpu().GetTotal(); d != nil {
		row[1] = d.AsDuration().Round(10 * time.Millisecond).String()
	}
	if d := u.GetCpu().GetThrottled(); d != nil {
		row[2] = d.AsDuration().Round(10 * time.Millisecond).String()
	}
	if io := u.GetIo(); io != nil {
		row[5], row[6] = size(io.GetReadBytes()), size(io.GetWrittenBytes())
	}
	if n := u.GetNetwork(); n != nil {
		row[7], row[8] = size(n.GetReceivedBytes()), size(n.GetSentBytes())
	}
	if d := u.GetDisk(); d != nil {
		row[9] = size(d.GetBytes())
	}
	return row
}

// cores returns a number of processors; empty for nil.
func cores(n *float64) string {
	if n == nil {
		return ""
	}
	return strconv.FormatFloat(*n, 'f', 2, 64)
}

func optionalNumber(n *int64) string {
	if n == nil {
		return ""
	}
	return strconv.FormatInt(*n, 10)
}

func optionalSize(n *int64) string {
	if n == nil {
		return ""
	}
	return size(*n)
}

// size returns a number of bytes for people, with three digits.
func size(n int64) string {
	if n < 1<<10 {
		return strconv.FormatInt(n, 10)
	}
	v, unit := float64(n), ""
	for _, unit = range []string{"Ki", "Mi", "Gi", "Ti"} {
		if v /= 1 << 10; v < 1000 {
			break
		}
	}
	if v < 99.95 {
		return fmt.Sprintf("%.1f%s", v, unit)
	}
	return fmt.Sprintf("%.0f%s", v, unit)
}
