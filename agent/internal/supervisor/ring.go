package supervisor

import "github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"

const (
	firstBuffer = 4 << 10
	// maxMarks bounds how often the kept output may change between the streams.
	maxMarks = 8192
)

// ring keeps the last bytes of a process's output. The first byte that it ever writes has offset 0.
type ring struct {
	limit      int
	buf        []byte // grows to limit
	first, end uint64
	marks      []mark // the changes of the stream, of which the first is at or before first
}

// mark is where bytes of a stream begin.
type mark struct {
	at     uint64
	stream wire.Stream
}

// write appends bytes, and forgets as many of the oldest as it has no room for.
func (r *ring) write(stream wire.Stream, b []byte) {
	if len(b) == 0 {
		return
	}
	if n := len(r.marks); n == 0 || r.marks[n-1].stream != stream {
		r.marks = append(r.marks, mark{r.end, stream})
	}
	if cut := len(b) - r.limit; cut > 0 {
		b = b[cut:]
		r.end += uint64(cut)
		r.first = r.end
	}
	r.grow(int(r.end-r.first) + len(b))
	for len(b) > 0 {
		n := copy(r.buf[r.end%uint64(len(r.buf)):], b)
		b = b[n:]
		r.end += uint64(n)
	}
	if kept := uint64(len(r.buf)); r.end-r.first > kept {
		r.first = r.end - kept
	}
	r.trim()
}

// grow makes room for n bytes, as far as the limit permits.
func (r *ring) grow(n int) {
	size := max(len(r.buf), min(firstBuffer, r.limit))
	for size < n && size < r.limit {
		size = min(2*size, r.limit)
	}
	if size == len(r.buf) {
		return
	}
	larger := make([]byte, size)
	for at := r.first; at < r.end; {
		at += uint64(copy(larger[at%uint64(size):], r.from(at)))
	}
	r.buf = larger
}

// trim forgets the marks of bytes that are not kept, and bytes that have too many.
func (r *ring) trim() {
	if over := len(r.marks) - maxMarks; over > 0 {
		r.first = max(r.first, r.marks[over].at)
	}
	gone := 0
	for gone+1 < len(r.marks) && r.marks[gone+1].at <= r.first {
		gone++
	}
	if gone > 0 {
		r.marks = append(r.marks[:0], r.marks[gone:]...)
	}
}

// from returns the bytes from an offset that is kept, up to the end or where the buffer wraps.
func (r *ring) from(at uint64) []byte {
	if at == r.end {
		return nil
	}
	i, n := at%uint64(len(r.buf)), r.end-at
	return r.buf[i:min(i+n, uint64(len(r.buf)))]
}

// next returns bytes of one stream from an offset on, at most limit of them; none if there is no more. The offset is at least first.
func (r *ring) next(at uint64, limit int) (wire.Stream, []byte) {
	b := r.from(at)
	if len(b) == 0 {
		return 0, nil
	}
	i := len(r.marks) - 1
	for r.marks[i].at > at {
		i--
	}
	if i+1 < len(r.marks) {
		limit = int(min(uint64(limit), r.marks[i+1].at-at))
	}
	return r.marks[i].stream, b[:min(len(b), limit)]
}
