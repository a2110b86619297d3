package index

// Kept is what an index keeps in memory: names of images and ports that have a number, chunks in use and spare.
func (x *Index) Kept() (images, ports, chunks, spare int) {
	used := func(sets []set) {
		for i := range sets {
			for _, c := range sets[i].chunks {
				if c != nil {
					chunks++
				}
			}
		}
	}
	used(x.images.at)
	used(x.ports.at)
	used(x.ranks[0].loads)
	used(x.ranks[1].loads)
	used([]set{x.offered})
	return len(x.images.number), len(x.ports.number), chunks, len(x.arena.spare)
}

// Eager makes an index keep hints of every search, however small.
func (x *Index) Eager() *Index {
	x.dear = 0
	return x
}

// Hints is the number of hints.
func (x *Index) Hints() int { return len(x.hints) }
