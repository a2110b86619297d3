package index

import "math/bits"

// A set is a set of agents: a bitmap of three levels with 64 children for each word. The lowest level is the words of a chunk;
// a word in each chunk has one bit for each of its words that is not zero; and words above have one bit for each chunk.
//
//	some    [ 0 .. 1 .. 0 ]                        one bit for each chunk (4,096 agents)
//	chunks         |  some [ 0 1 0 0 1 .. ]        one bit for each word (64 agents)
//	               |  full [ 0 0 0 0 1 .. ]        the same, for words of ones only
//	               +- words   | word |             one bit for each agent
//
// Chunks without members do not exist, so a small set is cheap, however many agents there are.
type set struct {
	some   []uint64
	chunks []*chunk
	n      int
}

type chunk struct {
	some, full uint64
	words      [64]uint64
}

const (
	chunkShift = 12
	wordShift  = 6
	wordMask   = 1<<wordShift - 1
)

// maxSpare bounds the memory of an arena, to 0.5 MiB.
const maxSpare = 1000

// arena keeps empty chunks for the sets of one index, so that sets that shrink and grow do not allocate memory.
type arena struct {
	spare []*chunk
}

func (m *arena) take() *chunk {
	if n := len(m.spare); n > 0 {
		c := m.spare[n-1]
		m.spare = m.spare[:n-1]
		return c
	}
	return new(chunk)
}

// give returns an empty chunk to the arena.
func (m *arena) give(c *chunk) {
	if len(m.spare) < maxSpare {
		m.spare = append(m.spare, c)
	}
}

// chunk returns a chunk of the set, or nil if it has no members.
func (s *set) chunk(c int) *chunk {
	if c < len(s.chunks) {
		return s.chunks[c]
	}
	return nil
}

func (s *set) has(id ID) bool {
	c := s.chunk(int(id >> chunkShift))
	return c != nil && c.words[id>>wordShift&wordMask]>>(id&wordMask)&1 != 0
}

// add adds a member, and returns false if it is one already.
func (s *set) add(id ID, m *arena) bool {
	at := int(id >> chunkShift)
	if at >= len(s.chunks) {
		s.grow(at)
	}
	c := s.chunks[at]
	if c == nil {
		c = m.take()
		s.chunks[at] = c
		s.some[at>>wordShift] |= 1 << (at & wordMask)
	}
	w, b := id>>wordShift&wordMask, uint64(1)<<(id&wordMask)
	if c.words[w]&b != 0 {
		return false
	}
	c.words[w] |= b
	c.some |= 1 << w
	if ^c.words[w] == 0 {
		c.full |= 1 << w
	}
	s.n++
	return true
}

func (s *set) grow(at int) {
	for at >= len(s.chunks) {
		s.chunks = append(s.chunks, nil)
	}
	for at>>wordShift >= len(s.some) {
		s.some = append(s.some, 0)
	}
}

// remove removes a member. It is idempotent.
func (s *set) remove(id ID, m *arena) {
	if !s.has(id) {
		return
	}
	at := int(id >> chunkShift)
	c := s.chunks[at]
	w := id >> wordShift & wordMask
	c.words[w] &^= 1 << (id & wordMask)
	c.full &^= 1 << w
	s.n--
	if c.words[w] != 0 {
		return
	}
	if c.some &^= 1 << w; c.some == 0 {
		s.chunks[at] = nil
		s.some[at>>wordShift] &^= 1 << (at & wordMask)
		m.give(c)
	}
}

// common returns the number of members that two sets share.
func (s *set) common(o *set) int {
	n := 0
	for i := range min(len(s.chunks), len(o.chunks)) {
		a, b := s.chunks[i], o.chunks[i]
		if a == nil || b == nil {
			continue
		}
		for words := a.some & b.some; words != 0; words &= words - 1 {
			w := bits.TrailingZeros64(words) & wordMask
			n += bits.OnesCount64(a.words[w] & b.words[w])
		}
	}
	return n
}

// first returns the lowest member that two sets share and that none of the others has, or -1. met is false if the two certainly
// share no member.
func first(a, b *set, without []*set) (id ID, met bool) {
	for i := range min(len(a.some), len(b.some)) {
		for chunks := a.some[i] & b.some[i]; chunks != 0; chunks &= chunks - 1 {
			at := i<<wordShift | bits.TrailingZeros64(chunks)
			w, word, m := firstIn(a.chunks[at], b.chunks[at], at, without)
			met = met || m
			if word != 0 {
				return ID(at<<chunkShift | w<<wordShift | bits.TrailingZeros64(word)), met
			}
		}
	}
	return -1, met
}

// firstIn is first for the chunk at a position: it returns the first word that is not zero, and its position.
func firstIn(a, b *chunk, at int, without []*set) (w int, word uint64, met bool) {
	words := a.some & b.some
	for _, s := range without {
		if c := s.chunk(at); c != nil && words&c.full != 0 {
			words &^= c.full
			met = true
		}
	}
	for ; words != 0; words &= words - 1 {
		w = bits.TrailingZeros64(words) & wordMask
		word = a.words[w] & b.words[w]
		if word == 0 {
			continue
		}
		met = true
		for _, s := range without {
			if c := s.chunk(at); c != nil {
				word &^= c.words[w]
			}
		}
		if word != 0 {
			return w, word, true
		}
	}
	return 0, 0, met
}
