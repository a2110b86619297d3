package index

import "github.com/fast-sandbox/fast-sandbox/services/allocator/internal/placement"

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

// Floor returns the rank at which a search for an image starts, and false if no agent has the image.
func (x *Index) Floor(image string) (placement.Rank, bool) {
	i, ok := x.images.number[image]
	if !ok {
		return placement.Nowhere, false
	}
	return x.floors[i], true
}

// Lowest returns the lowest rank at which an agent is offered.
func (x *Index) Lowest() placement.Rank { return x.next(0) }
