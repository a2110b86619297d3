package plan

import (
	"slices"
	"time"
)

// Quarantine remembers the nodes that Pods name and nobody knows, and since when. A node is unknown for a while for
// innocent reasons: caches are not of one age, and a node may register late. Only one that stayed unknown for the whole
// period is worth asking the API server for, and only the answer to that makes its Pods orphans.
//
//	named and unknown            period over                   the API server: no such node
//	------------------> waiting ------------> due, asked for --------------------------------> its Pods go
//	                       |                     |  ^ no answer, or Pods remain: again in the next round
//	                       | known, or not named |  |
//	                       v   any more          v--+
//	                    forgotten <--------- the API server: it exists
//
// The zero value is not usable; call NewQuarantine. A Quarantine is not safe for concurrent use.
type Quarantine struct {
	period time.Duration
	since  map[string]time.Time
}

// NewQuarantine returns an empty one.
func NewQuarantine(period time.Duration) *Quarantine {
	return &Quarantine{period: period, since: map[string]time.Time{}}
}

// Due takes in what was observed at a time, and returns the nodes, sorted, that are to be asked for now.
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

// Exists takes in that the API server knows the node: if it stays unknown to the caches, all begins anew.
func (q *Quarantine) Exists(name string) { delete(q.since, name) }

// Waiting is the number of nodes in quarantine.
func (q *Quarantine) Waiting() int { return len(q.since) }
