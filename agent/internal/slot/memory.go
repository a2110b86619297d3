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
	// Total is all of it, Available what could be had without swapping.
	Total, Available int64
}

// Memory is short below a twentieth of it, or below leastAvailable where that is less, and is no longer short once there is
// half as much again: in between things stay as they are.
const (
	shortShare     = 20
	leastAvailable = 512 << 20
)

// short tells whether memory is short, given whether it was.
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
		return Memory{}, fmt.Errorf("reading /proc/meminfo: it tells no total or no available memory")
	}
	return m, nil
}
