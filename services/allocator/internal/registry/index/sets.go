package index

// sets assigns numbers to names, and keeps a set for each. Numbers are small and reused.
type sets[K comparable] struct {
	number map[K]int32
	name   []K // by number, as at
	at     []set
	free   []int32
}

func newSets[K comparable]() sets[K] { return sets[K]{number: map[K]int32{}} }

// enter returns the number of a name, and adds the name if it has none.
func (s *sets[K]) enter(name K) int {
	if i, ok := s.number[name]; ok {
		return int(i)
	}
	if n := len(s.free); n > 0 {
		i := s.free[n-1]
		s.free = s.free[:n-1]
		s.number[name], s.name[i] = i, name
		return int(i)
	}
	i := len(s.at)
	s.number[name] = int32(i)
	s.name, s.at = append(s.name, name), append(s.at, set{})
	return i
}

// leave removes a name whose set is empty.
func (s *sets[K]) leave(i int) {
	var none K
	delete(s.number, s.name[i])
	s.name[i] = none
	s.free = append(s.free, int32(i))
}
