package slot

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Memory is a machine's memory, in bytes.
type Memory struct {
	// Total is all memory, Available what can be allocated without swapping.
	Total, Available int64
}

// Memory is short if less than a twentieth of it, or less than leastAvailable where that is smaller, is available. It is no
// longer short at one and a half times that: in between nothing changes.
const (
	shortShare     = 20
	leastAvailable = 512 << 20
)

// short reports whether memory is short, given whether it was.
func (m Memory) short(was bool) bool {
	limit := min(m.Total/shortShare, leastAvailable)
	if was {
		limit += limit / 2
	}
	return m.Available < limit
}

// readMemory reads /proc/meminfo.
func readMemory() (Memory, error) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return Memory{}, err
	}
	defer f.Close()
	var m Memory
	for lines := bufio.NewScanner(f); lines.Scan(); {
		key, value, _ := strings.Cut(lines.Text(), ":")
		into := map[string]*int64{"MemTotal": &m.Total, "MemAvailable": &m.Available}[key]
		if into == nil {
			continue
		}
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		if err != nil {
			return Memory{}, fmt.Errorf("reading %s of /proc/meminfo: %w", key, err)
		}
		*into = kib << 10
	}
	if m.Total == 0 || m.Available == 0 {
		return Memory{}, fmt.Errorf("reading /proc/meminfo: it has no total or no available memory")
	}
	return m, nil
}
