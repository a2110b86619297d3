package supervisor

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
)

// FuzzRing writes output of two streams, and compares what the ring keeps with all that was written. Each pair of bytes is a write: how much, and
// of which stream.
func FuzzRing(f *testing.F) {
	f.Add(uint16(8), []byte{3, 0, 4, 1, 9, 0, 1, 1, 1, 0, 0, 0, 200, 1})
	f.Add(uint16(4096), []byte{255, 0, 255, 1, 255, 0, 255, 0, 255, 1})
	f.Add(uint16(9000), []byte{255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0})
	f.Fuzz(func(t *testing.T, limit uint16, writes []byte) {
		r := &ring{limit: max(int(limit), 1)}
		var all []byte
		var of []wire.Stream
		for i := 0; i+1 < len(writes); i += 2 {
			stream := wire.Stdout + wire.Stream(writes[i+1]%2)
			piece := make([]byte, int(writes[i])*5)
			for j := range piece {
				piece[j] = byte(len(all) + j)
				of = append(of, stream)
			}
			all = append(all, piece...)
			r.write(stream, piece)
			require.EqualValues(t, len(all), r.end)
			require.LessOrEqual(t, len(r.buf), r.limit)
			require.LessOrEqual(t, int(r.end-r.first), r.limit)
			require.LessOrEqual(t, len(r.marks), maxMarks+1)
			if len(all) <= r.limit {
				require.Zero(t, r.first, "nothing is lost while there is room")
			}
		}
		for at := r.first; ; {
			stream, b := r.next(at, 100)
			if len(b) == 0 {
				require.Equal(t, r.end, at)
				break
			}
			require.LessOrEqual(t, len(b), 100)
			require.Equal(t, all[at:at+uint64(len(b))], b)
			for i := range b {
				require.Equal(t, of[at+uint64(i)], stream)
			}
			at += uint64(len(b))
		}
	})
}

func TestRingForgetsWhatChangesTooOften(t *testing.T) {
	r := &ring{limit: 1 << 20}
	for i := range 3 * maxMarks {
		r.write(wire.Stdout+wire.Stream(i%2), []byte{byte(i)})
	}
	require.LessOrEqual(t, len(r.marks), maxMarks+1)
	require.EqualValues(t, 3*maxMarks, r.end)
	require.Greater(t, r.first, uint64(maxMarks))
}
