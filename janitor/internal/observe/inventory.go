package observe

import (
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// name is the namespace and name of a Sandbox.
type name struct{ namespace, name string }

func nameOf(i identity.Identity) name { return name{i.Namespace, i.Name} }

// entry is the state of one container.
type entry struct {
	container Container
	seen      time.Time // when containerd was asked about it
	// missing is since when its Sandbox has been absent without interruption; zero if it is not.
	missing time.Time
	// live is the API server's own answer about its Sandbox, which replaces a cache that shows none, until liveUntil.
	live      resource
	liveUntil time.Time
	// asking reports whether a request for its Sandbox is scheduled; askAfter is the earliest time for it. See recheckLive.
	asking   bool
	askAfter time.Time
	last     Finding
}

// remnant is something that is left of a container without a record.
type remnant struct {
	last  Finding
	since time.Time
}

// ownedBy reports whether an agent owns it.
func (r *remnant) ownedBy(agentUID string) bool {
	for _, p := range r.last.Pieces {
		if p.Owner != "" && p.Owner == agentUID {
			return true
		}
	}
	return false
}

// inventory is the containers and remnants on the node, with indexes. It has no lock: NodeState.mu guards it.
type inventory struct {
	containers map[string]*entry
	byAgent    map[string]map[string]*entry
	byName     map[name]map[string]*entry
	remnants   map[Key]*remnant
}

func newInventory() inventory {
	return inventory{containers: map[string]*entry{}, byAgent: map[string]map[string]*entry{}, byName: map[name]map[string]*entry{}, remnants: map[Key]*remnant{}}
}

// put records a container as containerd returned it.
func (v *inventory) put(c Container, seen time.Time) *entry {
	e := v.containers[c.ID]
	if e == nil {
		e = &entry{}
		v.containers[c.ID] = e
	} else {
		v.unlink(e)
	}
	if e.container.Identity != c.Identity {
		e.missing, e.live, e.liveUntil = time.Time{}, resource{}, time.Time{} // they belonged to the previous identity
	}
	c.Record = nil
	e.container, e.seen = c, seen
	add(v.byAgent, c.Identity.AgentUID, e)
	add(v.byName, nameOf(c.Identity), e)
	return e
}

// drop removes a container that no longer exists, and reports whether it was known.
func (v *inventory) drop(id string) bool {
	e := v.containers[id]
	if e == nil {
		return false
	}
	delete(v.containers, id)
	v.unlink(e)
	return true
}

// dropRemnant removes a remnant that no longer exists, and reports whether it was known.
func (v *inventory) dropRemnant(key Key) bool {
	_, known := v.remnants[key]
	delete(v.remnants, key)
	return known
}

func (v *inventory) unlink(e *entry) {
	remove(v.byAgent, e.container.Identity.AgentUID, e)
	remove(v.byName, nameOf(e.container.Identity), e)
}

// ids returns the known containers.
func (v *inventory) ids() map[string]bool {
	out := make(map[string]bool, len(v.containers))
	for id := range v.containers {
		out[id] = true
	}
	return out
}

// named reports whether anything on the node names an agent.
func (v *inventory) named(agentUID string) bool {
	if len(v.byAgent[agentUID]) > 0 {
		return true
	}
	for _, r := range v.remnants {
		if r.ownedBy(agentUID) {
			return true
		}
	}
	return false
}

// surveyed records the result of a survey; complete reports whether it found everything. It reports whether a remnant was dropped.
func (v *inventory) surveyed(pieces []ctrd.Piece, complete bool, now time.Time) (dropped bool) {
	found := map[Key][]ctrd.Piece{}
	for _, p := range pieces {
		kind, ok := kindOf(p.Part)
		if _, has := v.containers[p.ID]; has || !ok {
			continue
		}
		key := Key{ID: p.ID, Remnant: true, Kind: kind}
		found[key] = append(found[key], p)
	}
	for key, list := range found {
		r := v.remnants[key]
		if r == nil {
			r = &remnant{since: now}
			v.remnants[key] = r
		}
		r.last.Key, r.last.Pieces = key, list
	}
	for key := range v.remnants {
		if _, has := v.containers[key.ID]; has || (complete && found[key] == nil) {
			delete(v.remnants, key)
			dropped = true
		}
	}
	return dropped
}

// kindOf returns the kind of a remnant by its part.
func kindOf(p ctrd.Part) (verdict.Kind, bool) {
	switch p {
	case ctrd.PartSnapshot:
		return verdict.Snapshot, true
	case ctrd.PartFIFOs:
		return verdict.FIFOs, true
	case ctrd.PartMount:
		return verdict.Mount, true
	case ctrd.PartCgroup:
		return verdict.Cgroup, true
	case ctrd.PartLog:
		return verdict.Log, true
	case ctrd.PartBundle:
		return verdict.Bundle, true
	case ctrd.PartRange:
		return verdict.Range, true
	case ctrd.PartShim:
		return verdict.Shim, true
	}
	return 0, false
}

func add[K comparable](index map[K]map[string]*entry, k K, e *entry) {
	if index[k] == nil {
		index[k] = map[string]*entry{}
	}
	index[k][e.container.ID] = e
}

func remove[K comparable](index map[K]map[string]*entry, k K, e *entry) {
	delete(index[k], e.container.ID)
	if len(index[k]) == 0 {
		delete(index, k)
	}
}
