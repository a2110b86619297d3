package ctrd

import (
	"context"
	"errors"
	"sync"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/plugins"
	"github.com/containerd/errdefs"

	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// support finds out whether containerd can run containers of the handler fsb. It needs
//
//	the sandbox store                  since 1.7: a container joins the shim that has a record there
//	shims of version 3 (Task API v3)   since 2.0: a container joins without another execution of the shim
//
// containerd 1.7 refuses such a shim only after it has started, and leaves its process. So the second is asked in advance: the call that has
// containerd execute a shim for a description of itself came with the same version. It also finds a shim that the host cannot execute.
type support struct {
	client *client.Client
	// binary returns the path of the shim on the host, which it may have to install.
	binary func() (string, error)

	mu    sync.Mutex
	found bool
}

// check returns nil if containerd can run the handler, and otherwise what to do. A success is remembered until forget is called.
func (s *support) check(ctx context.Context) error {
	s.mu.Lock()
	found := s.found
	s.mu.Unlock()
	if found {
		return nil
	}
	if _, err := s.client.SandboxStore().List(ctx, "id=="+shared.NoContainer); errdefs.IsNotImplemented(err) {
		return s.tooOld(ctx, err, "sandbox store")
	} else if err != nil {
		return classify(err, "asking containerd for its sandbox store")
	}
	binary, err := s.binary()
	if fault.ReasonOf(err) != "" {
		return err
	}
	if err != nil {
		return fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.RuntimeUnavailable, "the shim of the runtime handler fsb cannot be installed on the node: %s", err.Error())
	}
	_, err = s.client.IntrospectionService().PluginInfo(ctx, plugins.RuntimePluginV2.String(), "task", &types.RuntimeRequest{RuntimePath: binary})
	if errdefs.IsNotImplemented(err) {
		return s.tooOld(ctx, err, "support for shims of version 3")
	}
	if err != nil {
		return unexecutable(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.found = true
	return nil
}

// forget makes the next check ask containerd, which may be another version than before.
func (s *support) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.found = false
}

func (s *support) tooOld(ctx context.Context, cause error, lack string) error {
	version := "of the node"
	if v, err := s.client.Version(ctx); err == nil {
		version = v.Version
	}
	return fault.Wrap(cause, errdefs.ErrFailedPrecondition, fault.RuntimeUnavailable,
		"containerd %s has no %s, which the runtime handler fsb needs: upgrade containerd to 2.0 or later, or set runtimeHandler: runc in the pool", version, lack)
}

// unexecutable classifies the error of containerd when it executed the shim.
func unexecutable(err error) error {
	err = classify(err, "having containerd execute the shim")
	if fault.ReasonOf(err) != "" || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.RuntimeUnavailable,
		"containerd cannot execute the shim of the runtime handler fsb: %s; the agents' --slot-root must be at the same path on the host, without noexec", err.Error())
}
