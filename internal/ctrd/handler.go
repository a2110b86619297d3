package ctrd

import (
	"fmt"
	"strings"

	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/anypb"
)

const runcV2 = "io.containerd.runc.v2"

// Handler is a pool's runtime handler in containerd's terms.
type Handler struct {
	// Name of the runtime, for instance `io.containerd.runc.v2`.
	Name string
	// binary is the OCI runtime that the runc shim runs; empty for its own default.
	binary string
}

// ParseHandler reads a runtime handler: runc, crun, runsc, kata, or a containerd runtime name, which has dots in it.
// Anything else is errdefs.ErrInvalidArgument.
func ParseHandler(handler string) (Handler, error) {
	switch {
	case handler == "runc":
		return Handler{Name: runcV2}, nil
	case handler == "crun":
		return Handler{Name: runcV2, binary: "crun"}, nil
	case handler == "runsc":
		return Handler{Name: "io.containerd.runsc.v1"}, nil
	case handler == "kata":
		return Handler{Name: "io.containerd.kata.v2"}, nil
	case strings.Contains(handler, "."):
		return Handler{Name: handler}, nil
	}
	return Handler{}, fmt.Errorf("runtime handler %q is none of runc, crun, runsc, kata or a containerd runtime name: %w", handler, errdefs.ErrInvalidArgument)
}

// IsRunc tells whether the runtime is driven by containerd's runc shim.
func (h Handler) IsRunc() bool { return h.Name == runcV2 }

// Options are the runtime options of a task, nil for a runtime that takes none of ours. systemd says that the cgroup
// path is in systemd's form (slice:prefix:name).
func (h Handler) Options(systemd bool) (*anypb.Any, error) {
	if !h.IsRunc() || (h.binary == "" && !systemd) {
		return nil, nil //nolint:nilnil // no options is a valid answer
	}
	raw, err := anypb.New(&runcoptions.Options{BinaryName: h.binary, SystemdCgroup: systemd})
	if err != nil {
		return nil, fmt.Errorf("encoding runtime options: %w", err)
	}
	// containerd's registry of types knows the message by its bare name.
	raw.TypeUrl = strings.TrimPrefix(raw.GetTypeUrl(), "type.googleapis.com/")
	return raw, nil
}
