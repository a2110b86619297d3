package graph

// pending gathers the effects of one event.
type pending struct {
	effects Effects
	queued  map[Item]struct{}
}

// take returns what has been gathered since its last call.
func (p *pending) take() Effects {
	fx := p.effects
	p.effects = Effects{}
	clear(p.queued)
	return fx
}

// queue adds an item, once.
func (p *pending) queue(i Item) {
	if _, ok := p.queued[i]; !ok {
		p.queued[i] = struct{}{}
		p.effects.Items = append(p.effects.Items, i)
	}
}

// consider queues a node if there is an action for it.
func (p *pending) consider(n *node) {
	if n.entry.node != n {
		return // it was removed
	}
	if a := n.decide(); a.Verb != Keep {
		p.queue(Item{UID: n.UID, Orphan: a.orphaning})
	}
}

// considerDependents considers the dependents of all targets of a UID.
func (p *pending) considerDependents(e *entry) {
	for _, t := range e.targets {
		p.considerDependentsOf(t)
	}
}

// considerDependentsOf considers the dependents of a target.
func (p *pending) considerDependentsOf(t *target) {
	for d := range t.dependents {
		p.consider(d)
	}
}

// ask queues a target that needs a lookup.
func (p *pending) ask(t *target) {
	if t.asks() {
		p.queue(Item{Owner: t.ref})
	}
}

// warn records a reference across namespaces.
func (p *pending) warn(n *node, t *target) {
	across := t.invalid && !t.ref.malformed()
	if o := t.entry.node; o != nil && o.Kind == t.ref.Kind && o.Namespace != t.ref.Namespace && o.Namespace != "" {
		across = true
	}
	if across {
		p.effects.Invalid = append(p.effects.Invalid, Invalid{Dependent: n.object(), Owner: t.ref})
	}
}
