package limit

// MaxUsers is how many users are remembered.
const MaxUsers = maxUsers

// Users returns how many users are remembered.
func (l *Limits) Users() int { return len(l.buckets.Keys()) }

// Open returns of how many users something is open, by limit.
func (l *Limits) Open() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.open)
}
