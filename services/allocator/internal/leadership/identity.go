package leadership

import (
	"fmt"
	"net"
	"strings"

	"github.com/google/uuid"
)

// Identity names one life of an allocator process in the Lease, and tells the others where it is reached. As a string it
// is `<pod>_<host:port>_<nonce>`; an underscore is part of no Pod's name, no address and no uuid.
type Identity struct {
	// Pod is the name of the process's Pod, for people.
	Pod string
	// Address (host:port) is where other replicas reach its gRPC server.
	Address string
	// Nonce tells one life of a Pod's process from the next.
	Nonce string
}

// NewIdentity returns an identity that no process had before.
func NewIdentity(pod, address string) Identity {
	return Identity{Pod: pod, Address: address, Nonce: uuid.NewString()}
}

// String is the identity as it stands in the Lease.
func (i Identity) String() string { return i.Pod + "_" + i.Address + "_" + i.Nonce }

// ParseIdentity reads what String wrote.
func ParseIdentity(s string) (Identity, error) {
	parts := strings.Split(s, "_")
	if len(parts) != 3 || parts[2] == "" {
		return Identity{}, fmt.Errorf("parsing the holder %q: want pod_host:port_nonce", s)
	}
	host, port, err := net.SplitHostPort(parts[1])
	if err != nil || host == "" || port == "" {
		return Identity{}, fmt.Errorf("parsing the holder %q: %q is no address", s, parts[1])
	}
	return Identity{Pod: parts[0], Address: parts[1], Nonce: parts[2]}, nil
}
