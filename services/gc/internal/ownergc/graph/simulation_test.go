package graph_test

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// The kinds of the model. Hidden ones are not watched, and the API server does not serve ghosts.
var (
	apple  = graph.Kind{Group: "fruit", Kind: "Apple"}
	pear   = graph.Kind{Group: "fruit", Kind: "Pear"}
	garden = graph.Kind{Group: "land", Kind: "Garden"}
	hidden = graph.Kind{Group: "land", Kind: "Hidden"}
	ghost  = graph.Kind{Group: "land", Kind: "Ghost"}
)

const custom = "example.com/hold"

func scopes() map[graph.Kind]graph.Scope {
	return map[graph.Kind]graph.Scope{apple: graph.ScopeNamespaced, pear: graph.ScopeNamespaced, hidden: graph.ScopeNamespaced, garden: graph.ScopeCluster}
}

type location struct {
	kind            graph.Kind
	namespace, name string
}

type event struct {
	object graph.Object
	gone   bool
}

// model is a small API server with watches that lag, and executes the collector's actions.
type model struct {
	t       *rapid.T
	g       *graph.Graph
	objects map[string]*graph.Object
	// left and waited are the objects that were ever deleted with the policies Orphan and Foreground. A user who changes the
	// policy later is not observed everywhere at once.
	left, waited map[string]bool

	version int
	uids    int
	watches map[graph.Kind][]event
	pending []graph.Item
	parked  map[graph.Item]bool
	invalid []graph.Invalid
	writes  int
}

func newModel(t *rapid.T) *model {
	w := &model{t: t, g: graph.New(rapid.SampledFrom([]int{0, 1, 100}).Draw(t, "memory")), objects: map[string]*graph.Object{},
		left: map[string]bool{}, waited: map[string]bool{},
		watches: map[graph.Kind][]event{}, parked: map[graph.Item]bool{}}
	w.apply(w.g.Kinds(scopes()))
	return w
}

func (w *model) apply(fx graph.Effects) {
	slices.SortFunc(fx.Items, compareItems) // so that a failure is reproducible
	w.pending = append(w.pending, fx.Items...)
	w.invalid = append(w.invalid, fx.Invalid...)
}

// wrote sets the resource version of an object and notifies the watch of its kind.
func (w *model) wrote(o *graph.Object, gone bool) {
	w.version++
	o.ResourceVersion = strconv.Itoa(w.version)
	if gone {
		delete(w.objects, o.UID)
	}
	if o.Kind != hidden {
		w.watches[o.Kind] = append(w.watches[o.Kind], event{copied(*o), gone})
	}
}

func copied(o graph.Object) graph.Object {
	o.Owners, o.Finalizers = slices.Clone(o.Owners), slices.Clone(o.Finalizers)
	return o
}

func (w *model) create(kind graph.Kind, namespace string, owners []graph.Owner, finalizers ...string) string {
	w.uids++
	uid := fmt.Sprint("u", w.uids)
	o := &graph.Object{Kind: kind, Namespace: namespace, Name: "n" + uid, UID: uid, Owners: owners, Finalizers: finalizers}
	w.objects[uid] = o
	w.wrote(o, false)
	return uid
}

func (w *model) at(p location) *graph.Object {
	for _, o := range w.objects {
		if p == (location{o.Kind, o.Namespace, o.Name}) {
			return o
		}
	}
	return nil
}

// dangles reports whether a reference points at nothing and this can be known: the API server says so for one version at
// least, or the deletion of the UID was observed.
func (w *model) dangles(of *graph.Object, r graph.Owner) bool {
	in := r
	in.Version = "v1"
	o, resolvable := w.owner(of, in)
	return r.UID != "" && resolvable && o == nil
}

// owner returns the owner that a reference points at, and whether the API server can resolve it.
func (w *model) owner(of *graph.Object, r graph.Owner) (o *graph.Object, resolvable bool) {
	namespace := of.Namespace
	switch scopes()[r.Kind] {
	case graph.ScopeUnknown:
		return nil, false
	case graph.ScopeCluster:
		namespace = ""
	case graph.ScopeNamespaced:
		if namespace == "" {
			return nil, false
		}
	}
	if o := w.at(location{r.Kind, namespace, r.Name}); o != nil && o.UID == r.UID {
		return o, r.Version == "v1" || r.Kind != hidden // a watch knows it whatever the version
	}
	return nil, r.Version == "v1"
}

func awaits(o *graph.Object) bool {
	return o.Deleting && slices.Contains(o.Finalizers, graph.FinalizerForeground)
}

func orphans(o *graph.Object) bool {
	return o.Deleting && slices.Contains(o.Finalizers, graph.FinalizerOrphan)
}

// delete is the API server's DELETE.
func (w *model) delete(uid string, policy graph.Policy) {
	o := w.objects[uid]
	o.Finalizers = slices.DeleteFunc(slices.Clone(o.Finalizers), func(f string) bool {
		return f == graph.FinalizerForeground || f == graph.FinalizerOrphan
	})
	switch policy {
	case graph.Foreground:
		o.Finalizers = append(o.Finalizers, graph.FinalizerForeground)
		w.waited[uid] = true
	case graph.Orphan:
		o.Finalizers = append(o.Finalizers, graph.FinalizerOrphan)
		w.left[uid] = true
	}
	o.Deleting = true
	w.wrote(o, len(o.Finalizers) == 0)
}

func (w *model) finalize(uid, finalizer string) {
	o := w.objects[uid]
	o.Finalizers = slices.DeleteFunc(slices.Clone(o.Finalizers), func(f string) bool { return f == finalizer })
	w.wrote(o, o.Deleting && len(o.Finalizers) == 0)
}

// deliver gives the graph the next event of a watch, sometimes twice, or breaks the watch: then a list follows.
func (w *model) deliver(kind graph.Kind) {
	events := w.watches[kind]
	switch rapid.IntRange(0, 19).Draw(w.t, "delivery") {
	case 0:
		w.watches[kind] = nil
		w.list(kind)
		return
	case 1:
		w.show(events[0])
	}
	w.show(events[0])
	w.watches[kind] = events[1:]
}

func (w *model) show(e event) {
	if e.gone {
		w.apply(w.g.Remove(e.object))
	} else {
		w.apply(w.g.Observe(copied(e.object)))
	}
}

func (w *model) list(kind graph.Kind) {
	var list []graph.Object
	for _, uid := range w.all() {
		if o := w.objects[uid]; o.Kind == kind {
			list = append(list, copied(*o))
		}
	}
	w.apply(w.g.List(kind, list))
}

// all returns all UIDs in a reproducible order.
func (w *model) all() []string {
	var out []string
	for uid := range w.objects {
		out = append(out, uid)
	}
	slices.Sort(out)
	return out
}

// execute performs the action for an item.
func (w *model) execute(i graph.Item) {
	a := w.g.Decide(i, nil)
	switch a.Verb {
	case graph.Keep:
	case graph.Lookup:
		w.lookup(i, a.Ref)
	case graph.Verify:
		if o := w.at(location{a.Object.Kind, a.Object.Namespace, a.Object.Name}); o != nil && o.UID == a.Object.UID {
			w.apply(w.g.Confirm(o.UID))
			w.parked[i] = true
		} else {
			w.apply(w.g.Remove(a.Object))
		}
	default:
		live := w.objects[a.Object.UID]
		if live == nil {
			w.apply(w.g.Remove(a.Object))
			return
		}
		if live.ResourceVersion != a.Object.ResourceVersion {
			seen := copied(*live)
			if a = w.g.Decide(i, &seen); a.Verb == graph.Keep {
				w.parked[i] = true
				return
			}
			require.Equal(w.t, live.ResourceVersion, a.Object.ResourceVersion)
		}
		w.write(live, a)
	}
}

func (w *model) lookup(i graph.Item, r graph.Ref) {
	if r.Kind == ghost || r.Version != "v1" {
		w.apply(w.g.Unresolved(r))
		return
	}
	o := w.at(location{r.Kind, r.Namespace, r.Name})
	if o == nil || o.UID != r.UID {
		w.apply(w.g.Missing(r))
		return
	}
	w.apply(w.g.Found(r, copied(*o)))
	w.parked[i] = true
}

// write performs a write and checks that it is right for the API server's state, not only for what the collector observed.
func (w *model) write(live *graph.Object, a graph.Action) {
	w.writes++
	require.Less(w.t, w.writes, 10000, "it never ends: %+v", a)
	switch a.Verb {
	case graph.Delete:
		require.False(w.t, live.Deleting)
		require.NotEmpty(w.t, live.Owners)
		for _, r := range live.Owners {
			o, _ := w.owner(live, r)
			require.True(w.t, w.dangles(live, r) || o != nil && w.waited[o.UID], "%s is deleted while it has, or may have, an owner %+v", live.UID, r)
		}
		w.delete(live.UID, a.Policy)
	case graph.Patch:
		w.rightPatch(live, a)
		live.Owners = slices.Clone(a.Owners)
		w.wrote(live, false)
	case graph.Finalize:
		require.True(w.t, live.Deleting)
		require.Contains(w.t, live.Finalizers, a.Finalizer)
		w.finalize(live.UID, a.Finalizer)
	}
}

func (w *model) rightPatch(live *graph.Object, a graph.Action) {
	if a.Cause == graph.WaitCycle {
		require.Len(w.t, a.Owners, len(live.Owners))
		require.True(w.t, w.waited[live.UID])
		require.NotEqual(w.t, live.Owners, a.Owners)
		return
	}
	require.Less(w.t, len(a.Owners), len(live.Owners))
	for _, r := range live.Owners {
		if slices.Contains(a.Owners, r) {
			continue
		}
		o, _ := w.owner(live, r)
		require.True(w.t, w.dangles(live, r) || o != nil && (w.waited[o.UID] || w.left[o.UID]), "%s loses an owner %+v", live.UID, r)
	}
}

// step does one thing that is due; false if nothing is.
func (w *model) step() bool {
	var kinds []graph.Kind
	for _, k := range []graph.Kind{apple, pear, garden} {
		if len(w.watches[k]) > 0 {
			kinds = append(kinds, k)
		}
	}
	due := len(kinds) + len(w.pending)
	if due == 0 {
		return false
	}
	i := rapid.IntRange(0, due-1).Draw(w.t, "next")
	if i < len(kinds) {
		w.deliver(kinds[i])
		return true
	}
	item := w.pending[i-len(kinds)]
	w.pending = slices.Delete(w.pending, i-len(kinds), i-len(kinds)+1)
	if !slices.Contains(w.pending, item) {
		w.execute(item)
	}
	return true
}

// settle runs until nothing is left to do, and repeats parked lookups.
func (w *model) settle() {
	for range 100 {
		for w.step() {
		}
		if len(w.parked) == 0 {
			return
		}
		before := w.version
		again := w.parked
		w.parked = map[graph.Item]bool{}
		for i := range again {
			w.pending = append(w.pending, i)
		}
		slices.SortFunc(w.pending, compareItems)
		for w.step() {
		}
		if before == w.version && len(w.parked) == len(again) {
			return
		}
	}
	require.Fail(w.t, "the model does not settle")
}

func compareItems(a, b graph.Item) int {
	return slices.Compare([]byte(fmt.Sprintf("%+v", a)), []byte(fmt.Sprintf("%+v", b)))
}
