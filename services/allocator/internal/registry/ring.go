package registry

// node is an element of a ring: a circular list whose links are part of its members, so that neither joining nor leaving
// allocates memory. The ring itself is a node without an owner. init must be called before any other method.
type node[T any] struct {
	prev, next *node[T]
	owner      *T
}

func (n *node[T]) init(owner *T) { n.prev, n.next, n.owner = n, n, owner }

// leave removes a node from its ring, if it is in one.
func (n *node[T]) leave() {
	n.prev.next, n.next.prev = n.next, n.prev
	n.prev, n.next = n, n
}

// follow inserts a node after another one, and removes it from its old position.
func (n *node[T]) follow(at *node[T]) {
	n.leave()
	n.prev, n.next = at, at.next
	at.next.prev = n
	at.next = n
}

// alone reports whether a node is in no ring, or a ring is empty.
func (n *node[T]) alone() bool { return n.next == n }
