package registry

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestAttempts compares the table with a map in random histories. All attempts share one part, so that cells collide, wrap
// around its end, and move when others are removed.
func TestAttempts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := newAttempts()
		keys := inOnePart(table, 40)
		model := map[attempt]*allocation{}
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			key := rapid.SampledFrom(keys).Draw(t, "attempt")
			if rapid.Bool().Draw(t, "put") {
				model[key] = &allocation{key: key}
				table.put(model[key])
			} else {
				table.remove(key)
				delete(model, key)
			}
			for _, key := range keys {
				require.Same(t, model[key], table.first(key))
			}
			require.Equal(t, len(model), table.parts[0].n)
		}
		for _, key := range keys {
			table.remove(key)
		}
		require.Len(t, table.parts[0].cells, minCells, "an empty part is small")
	})
}

// inOnePart returns n attempts, two of each uid, that belong to the table's first part.
func inOnePart(table *attempts, n int) []attempt {
	var keys []attempt
	for i := int64(0); len(keys) < n; i++ {
		key := attempt{fmt.Sprint("uid-", i/2), i % 2}
		if p, _ := table.part(key); p == &table.parts[0] {
			keys = append(keys, key)
		}
	}
	return keys
}
