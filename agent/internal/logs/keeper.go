package logs

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd/node"
)

const (
	// keepInterval is how often logs are checked. In between, a log may grow beyond its bound.
	keepInterval = 250 * time.Millisecond
	// growingInterval is how often a log is checked that grows fast.
	growingInterval = 20 * time.Millisecond
	// indexInterval is the resolution of the index.
	indexInterval = time.Second
	entrySize     = 16
	maxEntries    = 4096
)

// entry means that at least offset bytes had been written at the time.
type entry struct {
	at     time.Time
	offset int64
}

// keeper bounds and indexes one log.
type keeper struct {
	dir string
	max int64

	mu       sync.Mutex // one check at a time
	released bool       // no more checks
	loaded   bool
	hole     int64 // bytes before it are freed
	size     int64 // at the last check
	measured int64 // size at the end of the last interval
	grows    bool  // by much in an interval
	last     entry
	entries  int
}

// release waits for a check that runs and prevents all others.
func (k *keeper) release() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.released = true
}

// keep checks the log once. mu is held over I/O on purpose: it separates two checks, and a check and the release.
func (k *keeper) keep(now func() time.Time) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.released {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(k.dir, outputName), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := k.load(f); err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	// The time is taken after the size: all before the size was written by then.
	at, size := now(), info.Size()
	k.size = size
	if size-k.hole > k.max {
		if err := k.punch(f, size); err != nil {
			return err
		}
	}
	if size == k.last.offset || at.Sub(k.last.at) < indexInterval {
		return nil
	}
	return k.index(entry{at, size})
}

// measure is called at the end of each interval: it determines whether the log grows so fast that it exceeds its bound by much in the next.
func (k *keeper) measure() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.grows = k.size-k.measured > k.max/8
	k.measured = k.size
}

func (k *keeper) growing() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.grows && !k.released
}

// load reads, once, what an earlier process left. A crash of the node may have left an index with a torn entry, after which the
// next ones could not be read, or with output that the file has lost: such entries are dropped.
func (k *keeper) load(f *os.File) error {
	if k.loaded {
		return nil
	}
	var err error
	if k.hole, err = dataStart(f, 0); err != nil {
		return err
	}
	entries, err := readIndex(k.dir)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	k.entries = sort.Search(len(entries), func(i int) bool { return entries[i].offset > info.Size() })
	if k.entries > 0 {
		k.last = entries[k.entries-1]
	}
	err = os.Truncate(filepath.Join(k.dir, indexName), int64(k.entries)*entrySize)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	k.loaded = true
	return nil
}

// punch frees the oldest part of the log.
func (k *keeper) punch(f *os.File, size int64) error {
	start, err := node.TrimLog(f, size, k.max)
	k.hole = max(k.hole, start)
	return err
}

func (k *keeper) index(e entry) error {
	if k.entries >= maxEntries {
		if err := k.thin(); err != nil {
			return err
		}
	}
	f, err := os.OpenFile(filepath.Join(k.dir, indexName), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(encode(e)); err != nil {
		return err
	}
	k.last, k.entries = e, k.entries+1
	return nil
}

// thin drops entries within the hole, and every other one if that is not enough: the resolution gets coarser, but Read still
// never skips more than Since asks for.
func (k *keeper) thin() error {
	entries, err := readIndex(k.dir)
	if err != nil {
		return err
	}
	first := max(sort.Search(len(entries), func(i int) bool { return entries[i].offset > k.hole })-1, 0)
	entries = entries[first:]
	if len(entries) > maxEntries/2 {
		half := entries[:0]
		for i := 0; i < len(entries); i += 2 {
			half = append(half, entries[i])
		}
		entries = half
	}
	raw := make([]byte, 0, len(entries)*entrySize)
	for _, e := range entries {
		raw = append(raw, encode(e)...)
	}
	tmp := filepath.Join(k.dir, indexName+".new")
	if err := os.WriteFile(tmp, raw, 0o600); err != nil {
		return err
	}
	if err := os.Rename(tmp, filepath.Join(k.dir, indexName)); err != nil {
		return err
	}
	k.entries = len(entries)
	return nil
}

func encode(e entry) []byte {
	b := make([]byte, entrySize)
	binary.LittleEndian.PutUint64(b, uint64(e.at.UnixNano()))
	binary.LittleEndian.PutUint64(b[8:], uint64(e.offset))
	return b
}

// readIndex returns the entries up to a torn one, or one that is out of order.
func readIndex(dir string) ([]entry, error) {
	raw, err := os.ReadFile(filepath.Join(dir, indexName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	entries := make([]entry, 0, len(raw)/entrySize)
	for ; len(raw) >= entrySize; raw = raw[entrySize:] {
		e := entry{
			at:     time.Unix(0, int64(binary.LittleEndian.Uint64(raw))),
			offset: int64(binary.LittleEndian.Uint64(raw[8:])),
		}
		if n := len(entries); e.offset < 0 || n > 0 && e.offset < entries[n-1].offset {
			break
		}
		entries = append(entries, e)
	}
	return entries, nil
}

// dataStart returns the first offset from off on that has data, or the file's end.
func dataStart(f *os.File, off int64) (int64, error) {
	n, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
	switch {
	case err == nil:
		return n, nil
	case errors.Is(err, unix.ENXIO):
		info, err := f.Stat()
		if err != nil {
			return 0, err
		}
		return max(info.Size(), off), nil
	case errors.Is(err, unix.EINVAL):
		return off, nil // a file system without holes
	}
	return 0, &os.PathError{Op: "seeking in", Path: f.Name(), Err: err}
}
