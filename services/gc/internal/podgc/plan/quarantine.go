package plan

import (
	"slices"
	"time"
)

// Quarantine tracks the nodes that Pods name and that are not known, and since when. A node can be unknown for a while for
// harmless reasons: caches differ in age, and a node may register late. Only a node that stayed unknown for the whole period is
// looked up at the API server, and only its answer makes the node's Pods orphans.
//
//	named and unknown            period over                       the API server: not found
//	------------------> waiting ------------> due, looked up --------------------------------> its Pods are deleted
//	                       |                     |  ^ no answer, or Pods remain: again in the next round
//	                       | known, or no longer |  |
//	                       v named               v--+
//	                    dropped <--------- the API server: it exists
//
// The zero value is not usable; call NewQuarantine. A Quarantine is not safe for concurrent use.
type Quarantine struct {
	period time.Duration
	since  map[string]time.Time
}

// NewQuarantine returns an empty quarantine.
func NewQuarantine(period time.Duration) *Quarantine {
	return &Quarantine{period: period, since: map[string]time.Time{}}
}

// Due records an observation, and returns the nodes to look up now, sorted.
func (q *Quarantine) Due(now time.Time, pods []Pod, nodes []Node) []string {
	unknown := map[string]bool{}
	for _, p := range pods {
		if p.Node != "" {
			unknown[p.Node] = true
		}
	}
	for _, n := range nodes {
		delete(unknown, n.Name)
	}
	for name := range q.since {
		if !unknown[name] {
			delete(q.since, name)
		}
	}
	var due []string
	for name := range unknown {
		since, waiting := q.since[name]
		switch {
		case !waiting:
			q.since[name] = now
			if q.period <= 0 {
				due = append(due, name)
			}
		case now.Sub(since) >= q.period:
			due = append(due, name)
		}
	}
	slices.Sort(due)
	return due
}

// Exists records that the API server has the node: if it stays unknown to the caches, its quarantine restarts.
func (q *Quarantine) Exists(name string) { delete(q.since, name) }

// Waiting returns the number of nodes in quarantine.
func (q *Quarantine) Waiting() int { return len(q.since) }
