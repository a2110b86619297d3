package janitor

// Readings is the type of metrics that were read.
type Readings = readings

// ParseMetrics and Label read metrics, ParseRequests the audit log, MountsBelow the mounts.
var (
	ParseMetrics  = parseMetrics
	Label         = label
	ParseRequests = parseRequests
	MountsBelow   = mountsBelow
)

// Sum adds up a metric.
func (r readings) Sum(name string) float64 { return r.sum(name) }

// Judged returns nil if the janitor judges exactly that many containers, all healthy.
func (r readings) Judged(want int) error { return r.judged(want) }

// Asked counts requests.
func (w *Window) Asked(all []request) { w.asked(all) }

// WorkspaceAt returns a workspace for a test.
func WorkspaceAt(dir, content, cgroup string) *workspace {
	return &workspace{dir: dir, content: content, cgroup: cgroup}
}

// Has reports whether a process belongs to the workspace.
func (p *workspace) Has(exe, cmdline, cgroups string) bool { return p.has(exe, cmdline, cgroups) }

// Acquire acquires the workspace.
func (p *workspace) Acquire() error { return p.acquire() }

// Release releases it.
func (p *workspace) Release() error { return p.release() }
