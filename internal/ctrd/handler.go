package ctrd

import (
	"fmt"
	"strings"

	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/anypb"
)

const (
	runcV2 = "io.containerd.runc.v2"
	own    = "io.containerd.fsb.v1"
)

// Handler is a pool's runtime handler in containerd's terms.
type Handler struct {
	// Name of the runtime, for instance `io.containerd.runc.v2`.
	Name string
	// binary is the OCI runtime that the runc shim executes; empty for its default.
	binary string
}

// ParseHandler parses a runtime handler: fsb, runc, crun, runsc, kata, or a containerd runtime name, which contains dots.
// Anything else is errdefs.ErrInvalidArgument.
func ParseHandler(handler string) (Handler, error) {
	switch {
	case handler == "runc":
		return Handler{Name: runcV2}, nil
	case handler == "fsb":
		return Handler{Name: own}, nil
	case handler == "crun":
		return Handler{Name: runcV2, binary: "crun"}, nil
	case handler == "runsc":
		return Handler{Name: "io.containerd.runsc.v1"}, nil
	case handler == "kata":
		return Handler{Name: "io.containerd.kata.v2"}, nil
	case strings.Contains(handler, "."):
		return Handler{Name: handler}, nil
	}
	return Handler{}, fmt.Errorf("invalid runtime handler %q, want fsb, runc, crun, runsc, kata or a containerd runtime name: %w", handler, errdefs.ErrInvalidArgument)
}

// IsOwn reports whether the runtime is our own shim. Its name in a record is the path of its binary.
func (h Handler) IsOwn() bool { return h.Name == own }

// IsRunc reports whether the runtime uses containerd's runc shim.
func (h Handler) IsRunc() bool { return h.Name == runcV2 }

// Options returns the runtime options of a task; nil if there are none. systemd reports whether the cgroup path is in systemd's
// form (slice:prefix:name). shimCgroup is the path of an existing cgroup, below the hierarchies' roots, in which a new shim of
// containerd's is; empty for that of containerd.
func (h Handler) Options(systemd bool, shimCgroup string) (*anypb.Any, error) {
	if !h.IsRunc() || (h.binary == "" && !systemd && shimCgroup == "") {
		return nil, nil //nolint:nilnil // no options is a valid answer
	}
	raw, err := anypb.New(&runcoptions.Options{BinaryName: h.binary, SystemdCgroup: systemd, ShimCgroup: shimCgroup})
	if err != nil {
		return nil, fmt.Errorf("encoding runtime options: %w", err)
	}
	// containerd registers the message under its bare name.
	raw.TypeUrl = strings.TrimPrefix(raw.GetTypeUrl(), "type.googleapis.com/")
	return raw, nil
}
