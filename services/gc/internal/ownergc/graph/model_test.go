package graph_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// drawOwner draws a reference: most are valid, some lead to a missing object, to another namespace, or to an unknown kind.
func (w *model) drawOwner(strange bool) (graph.Owner, bool) {
	uids := w.all()
	if len(uids) == 0 {
		return graph.Owner{}, false
	}
	o := w.objects[rapid.SampledFrom(uids).Draw(w.t, "owner")]
	r := graph.Owner{Kind: o.Kind, Version: "v1", Name: o.Name, UID: o.UID,
		Block: rapid.SampledFrom([]graph.Flag{graph.Unset, graph.False, graph.True, graph.True}).Draw(w.t, "block")}
	if strange {
		switch rapid.IntRange(0, 14).Draw(w.t, "strange") {
		case 0:
			r.UID = "absent-uid"
		case 1:
			r.Name = "another"
		case 2:
			r.Kind = rapid.SampledFrom([]graph.Kind{apple, pear, garden, hidden}).Draw(w.t, "kind")
		case 3:
			r.Kind = ghost
		case 4:
			r.Version = "v9"
		case 5:
			r.UID = ""
		}
	}
	return r, true
}

func (w *model) drawOwners(strange bool) []graph.Owner {
	var out []graph.Owner
	for range rapid.SampledFrom([]int{0, 1, 1, 1, 2, 3}).Draw(w.t, "owners") {
		if r, ok := w.drawOwner(strange); ok {
			out = append(out, r)
		}
	}
	return out
}

func (w *model) drawCreate(strange bool, finalizers ...string) {
	kind := rapid.SampledFrom([]graph.Kind{apple, apple, pear, pear, garden, hidden}).Draw(w.t, "kind")
	namespace := ""
	if kind != garden {
		namespace = "one"
		if strange {
			namespace = rapid.SampledFrom([]string{"one", "one", "one", "two"}).Draw(w.t, "namespace")
		}
	}
	w.create(kind, namespace, w.drawOwners(strange), finalizers...)
}

func (w *model) drawUID() (string, bool) {
	uids := w.all()
	if len(uids) == 0 {
		return "", false
	}
	return rapid.SampledFrom(uids).Draw(w.t, "object"), true
}

// user performs one random operation of a user.
func (w *model) user() {
	op := rapid.IntRange(0, 9).Draw(w.t, "op")
	uid, ok := w.drawUID()
	switch {
	case op < 4 || !ok:
		w.drawCreate(true, rapid.SampledFrom([][]string{nil, nil, nil, {custom}, {graph.FinalizerOrphan}, {graph.FinalizerForeground}}).Draw(w.t, "finalizers")...)
	case op < 7:
		w.delete(uid, rapid.SampledFrom([]graph.Policy{graph.Background, graph.Foreground, graph.Orphan}).Draw(w.t, "policy"))
	case op == 7:
		o := w.objects[uid]
		o.Owners = w.drawOwners(true)
		w.wrote(o, false)
	case op == 8:
		w.finalize(uid, custom)
	default:
		o := w.objects[uid] // a change without effect
		w.wrote(o, false)
	}
}

// TestCollector runs users and the collector concurrently, with watches that lag, repeat and break. Every write is checked
// against the API server's state (model.write); in the end no garbage is left.
func TestCollector(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newModel(t)
		for range rapid.IntRange(1, 25).Draw(t, "ops") {
			w.user()
			for range rapid.IntRange(0, 6).Draw(t, "steps") {
				w.step()
			}
		}
		w.settle()
		for _, uid := range w.all() {
			if w.objects[uid] != nil {
				w.finalize(uid, custom)
			}
		}
		w.settle()
		w.requireClean()
		w.requireSameGraph()
	})
}

// requireClean checks the final state: no garbage, no dangling reference beside a solid one, no deletion that is stuck without a reason.
func (w *model) requireClean() {
	for _, uid := range w.all() {
		o := w.objects[uid]
		if o.Kind == hidden {
			continue // it is not watched, so it is not collected
		}
		good, bad, unclear := 0, 0, 0
		for _, r := range o.Owners {
			owner, resolvable := w.owner(o, r)
			switch {
			case !resolvable || r.UID == "":
				unclear++
			case owner == nil || owner.Kind != hidden && awaits(owner):
				bad++
			default:
				good++
			}
		}
		if !o.Deleting && unclear == 0 {
			require.False(w.t, good == 0 && bad > 0, "%+v is garbage", *o)
			require.False(w.t, good > 0 && bad > 0, "%+v has dangling references", *o)
		}
		require.False(w.t, orphans(o), "%+v still orphans", *o)
		if awaits(o) {
			require.True(w.t, w.heldUp(o), "%+v still waits", *o)
		} else {
			require.False(w.t, o.Deleting, "%+v is still there", *o)
		}
	}
}

// heldUp reports whether a dependent that cannot be collected blocks an object, directly or not.
func (w *model) heldUp(o *graph.Object) bool {
	for _, d := range w.objects {
		for _, r := range d.Owners {
			if owner, _ := w.owner(d, r); owner == o && r.Block == graph.True {
				unclear := slices.ContainsFunc(d.Owners, func(r graph.Owner) bool {
					_, resolvable := w.owner(d, r)
					return !resolvable || r.UID == ""
				})
				if unclear || d != o && awaits(d) {
					return true
				}
			}
		}
	}
	return false
}

// dependsOnThePast reports whether a reference names a version that is not served. Such a reference is known to dangle only if
// the deletion of the object was observed, or another version was looked up.
func (w *model) dependsOnThePast() bool {
	for _, o := range w.objects {
		for _, r := range o.Owners {
			if owner, resolvable := w.owner(o, r); owner == nil && !resolvable && w.dangles(o, r) {
				return true
			}
		}
	}
	return false
}

// requireSameGraph requires that a collector that starts now sees the same and has nothing to do.
func (w *model) requireSameGraph() {
	if w.dependsOnThePast() {
		return
	}
	before := w.g.Size()
	w.g = graph.New(10)
	w.pending, w.parked = nil, map[graph.Item]bool{}
	w.apply(w.g.Kinds(scopes()))
	for _, kind := range rapid.Permutation([]graph.Kind{apple, pear, garden}).Draw(w.t, "kinds") {
		w.list(kind)
	}
	require.Equal(w.t, before, w.g.Size())
	version := w.version
	w.settle()
	require.Equal(w.t, version, w.version, "a restarted collector finds work")
	require.Equal(w.t, before, w.g.Size())
}

// TestCascade deletes one object of a graph at rest, and compares the result with a simple rule: an object that has lost its
// last owner is deleted.
func TestCascade(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newModel(t)
		for range rapid.IntRange(1, 12).Draw(t, "objects") {
			w.drawCreate(true)
		}
		// References that form cycles.
		for range rapid.IntRange(0, 4).Draw(t, "further references") {
			uid, _ := w.drawUID()
			o := w.objects[uid]
			r, _ := w.drawOwner(false)
			if !slices.ContainsFunc(o.Owners, func(other graph.Owner) bool { return other.UID == r.UID }) {
				o.Owners = append(o.Owners, r)
				w.wrote(o, false)
			}
		}
		w.settle()
		root, ok := w.drawUID()
		if !ok || w.objects[root].Kind == hidden {
			return
		}
		policy := rapid.SampledFrom([]graph.Policy{graph.Background, graph.Foreground, graph.Orphan}).Draw(t, "policy")
		want, held := w.naive(root, policy)
		w.delete(root, policy)
		w.settle()
		if held {
			return // TestCollector covers this case
		}
		got := map[string][]graph.Owner{}
		for uid, o := range w.objects {
			got[uid] = ownersWithoutBlock(o.Owners)
		}
		require.Equal(t, want, got)
	})
}

func ownersWithoutBlock(owners []graph.Owner) []graph.Owner {
	out := []graph.Owner{}
	for _, o := range owners {
		o.Block = graph.Unset // wait cycles lose it
		out = append(out, o)
	}
	return out
}

// naive returns what must be left after a deletion, and whether that can be predicted: it cannot if an object that cannot be
// collected blocks a part of it.
func (w *model) naive(root string, policy graph.Policy) (left map[string][]graph.Owner, held bool) {
	truth := map[string]*graph.Object{}
	for uid, o := range w.objects {
		c := copied(*o)
		truth[uid] = &c
	}
	defer func(objects map[string]*graph.Object) { w.objects = objects }(w.objects)
	w.objects = truth
	held = w.dependsOnThePast()
	if policy == graph.Orphan {
		for _, o := range truth {
			leaves := func(r graph.Owner) bool { owner, _ := w.owner(o, r); return owner == truth[root] }
			if o.Kind != hidden && slices.ContainsFunc(o.Owners, leaves) {
				o.Owners = slices.DeleteFunc(o.Owners, func(r graph.Owner) bool { return leaves(r) || w.dangles(o, r) })
			}
		}
	}
	delete(truth, root)
	for changed := true; changed; {
		changed = false
		for _, o := range truth {
			if o.Kind == hidden {
				held = held || policy == graph.Foreground
				continue
			}
			good, bad, unclear := []graph.Owner{}, 0, false
			for _, r := range o.Owners {
				switch _, resolvable := w.owner(o, r); {
				case w.dangles(o, r):
					bad++
				case !resolvable || r.UID == "":
					unclear = true
				default:
					good = append(good, r)
				}
			}
			switch {
			case unclear:
				held = held || policy == graph.Foreground
			case bad > 0 && len(good) == 0:
				delete(truth, o.UID)
				changed = true
			case bad > 0:
				o.Owners = good
				changed = true
			}
		}
	}
	left = map[string][]graph.Owner{}
	for uid, o := range truth {
		left[uid] = ownersWithoutBlock(o.Owners)
	}
	return left, held
}
