package sandbox

// table holds the sandboxes by sandbox uid: one attempt of each is in force. The manager's lock guards it.
type table map[string]*entry

// holdsContainer reports whether a container is a sandbox's, also one that is not made yet.
func (t table) holdsContainer(id string) bool {
	for _, e := range t {
		if e.id == id || e.fence.ContainerID() == id {
			return true
		}
	}
	return false
}

// inUse returns the number of capacity units that sandboxes hold.
func (t table) inUse() int {
	n := 0
	for _, e := range t {
		if e.holdsCapacity() {
			n++
		}
	}
	return n
}

// portHolder returns the sandbox that holds a port of the agent's network; nil if none does.
func (t table) portHolder(port int32) *entry {
	for _, e := range t {
		if e.holdsPort(port) {
			return e
		}
	}
	return nil
}

// ended returns the sandboxes whose processes have ended and that are not being deleted. Abandoned creates are not among them.
func (t table) ended() []*entry {
	var ended []*entry
	for _, e := range t {
		if e.deletion == nil && e.createErr == nil && isClosed(e.ended) {
			ended = append(ended, e)
		}
	}
	return ended
}
