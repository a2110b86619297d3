package index

// Kept returns what an index keeps in memory: images and ports that have a number, chunks in use, and spare chunks.
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
