package janitor

// Readings is the type of what metrics say.
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

// Judged tells whether the janitor judges nothing but so many healthy containers.
func (r readings) Judged(want int) error { return r.judged(want) }

// Asked counts requests.
func (w *Window) Asked(all []request) { w.asked(all) }

// PlaceAt is a place of a test's own.
func PlaceAt(dir, content, cgroup string) *place {
	return &place{dir: dir, content: content, cgroup: cgroup}
}

// Has, Enter and Leave are those of a run.
func (p *place) Has(cmdline, cgroups string) bool { return p.has(cmdline, cgroups) }

// Enter takes the place.
func (p *place) Enter() error { return p.enter() }

// Leave gives it back.
func (p *place) Leave() error { return p.leave() }
