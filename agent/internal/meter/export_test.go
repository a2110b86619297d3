package meter

// MaxDone is for tests.
const MaxDone = maxDone

// Done returns the number of ended containers that are remembered.
func (m *Meter) Done() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.sums.done)
}
