package registry

// node is an element of a ring: a list without ends that lives in its members, so that neither joining nor leaving
// allocates. The ring itself is a node without an owner. Its zero value must be made ready by init.
type node[T any] struct {
	prev, next *node[T]
	owner      *T
}

func (n *node[T]) init(owner *T) { n.prev, n.next, n.owner = n, n, owner }

// leave takes a node out of the ring that it is in, if any.
func (n *node[T]) leave() {
	n.prev.next, n.next.prev = n.next, n.prev
	n.prev, n.next = n, n
}

// follow puts a node behind another one, out of wherever it was.
func (n *node[T]) follow(at *node[T]) {
	n.leave()
	n.prev, n.next = at, at.next
	at.next.prev = n
	at.next = n
}

// alone tells that a node is in no ring, or that a ring is empty.
func (n *node[T]) alone() bool { return n.next == n }
