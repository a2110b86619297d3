package leadership

import (
	"fmt"
	"net"
	"strings"

	"github.com/google/uuid"
)

// Identity identifies one run of an allocator process in the Lease, and holds its address for the other replicas. Its string
// is `<pod>_<host:port>_<nonce>`; Pod names, addresses and UUIDs contain no underscore.
type Identity struct {
	// Pod is the name of the process's Pod, for people.
	Pod string
	// Address (host:port) of its gRPC server, for the other replicas.
	Address string
	// Nonce differs between two runs of the process in one Pod.
	Nonce string
}

// NewIdentity returns a new, unique identity.
func NewIdentity(pod, address string) Identity {
	return Identity{Pod: pod, Address: address, Nonce: uuid.NewString()}
}

// String returns the identity as it is written to the Lease.
func (i Identity) String() string { return i.Pod + "_" + i.Address + "_" + i.Nonce }

// Replaces reports whether a holder is an earlier run of this process, which has ended: of two processes in one Pod only one can
// listen on its address.
func (i Identity) Replaces(holder string) bool {
	other, err := ParseIdentity(holder)
	return err == nil && other.Pod == i.Pod && other.Address == i.Address && other.Nonce != i.Nonce
}

// ParseIdentity parses the result of String.
func ParseIdentity(s string) (Identity, error) {
	parts := strings.Split(s, "_")
	if len(parts) != 3 || parts[2] == "" {
		return Identity{}, fmt.Errorf("parsing the holder %q: want pod_host:port_nonce", s)
	}
	host, port, err := net.SplitHostPort(parts[1])
	if err != nil || host == "" || port == "" {
		return Identity{}, fmt.Errorf("parsing the holder %q: invalid address %q", s, parts[1])
	}
	return Identity{Pod: parts[0], Address: parts[1], Nonce: parts[2]}, nil
}
