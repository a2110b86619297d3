package usage

import (
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
)

// Network counts what passed the interfaces of a network namespace, the loopback interface excepted.
type Network struct{ ReceivedBytes, SentBytes, ReceivedPackets, SentPackets, ReceivedDropped, SentDropped int64 }

// Columns of /proc/PID/net/dev after the name of the interface.
const (
	receivedBytes, receivedPackets, receivedDropped = 0, 1, 3
	sentBytes, sentPackets, sentDropped             = 8, 9, 11
	interfaceColumns                                = 16
)

// ReadNetwork adds up the interfaces in the text of /proc/PID/net/dev.
func ReadNetwork(dev string) (Network, error) {
	var n Network
	for line := range strings.Lines(dev) {
		name, rest, ok := strings.Cut(line, ":")
		if !ok || strings.TrimSpace(name) == "lo" { // the two lines of the header have no colon
			continue
		}
		columns := strings.Fields(rest)
		if len(columns) < interfaceColumns {
			return Network{}, fmt.Errorf("reading the interface %s: %d columns: %w", strings.TrimSpace(name), len(columns), errdefs.ErrInternal)
		}
		for column, to := range map[int]*int64{
			receivedBytes: &n.ReceivedBytes, receivedPackets: &n.ReceivedPackets, receivedDropped: &n.ReceivedDropped,
			sentBytes: &n.SentBytes, sentPackets: &n.SentPackets, sentDropped: &n.SentDropped,
		} {
			v, err := number(columns[column])
			if err != nil {
				return Network{}, fmt.Errorf("reading the interface %s: %w", strings.TrimSpace(name), err)
			}
			*to += v
		}
	}
	return n, nil
}
