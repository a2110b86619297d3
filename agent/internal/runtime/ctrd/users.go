package ctrd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
)

// UserNamespace says whether containers have user namespaces.
type UserNamespace string

// The values.
const (
	// UsersDisabled: none has one.
	UsersDisabled UserNamespace = "Disabled"
	// UsersAuto: all have one if the node can do that.
	UsersAuto UserNamespace = "Auto"
	// UsersRequired: no container is created if the node cannot do that.
	UsersRequired UserNamespace = "Required"
)

// userNamespaces knows whether containers have user namespaces, and gives them ranges of ids.
type userNamespaces struct {
	mode   UserNamespace
	ranges idrange.Ranges
	owner  string
	// missing is what the node lacks.
	missing *probe

	mu sync.Mutex
	// unswept has the containers that took a range before the sweep; nil after it.
	unswept map[string]bool
}

func newUserNamespaces(cfg Config, roots *slotRoots) *userNamespaces {
	return &userNamespaces{
		mode: cfg.Users, ranges: cfg.IDs, owner: cfg.PodUID, unswept: map[string]bool{},
		missing: &probe{clock: cfg.Clock, try: func() error {
			if !cfg.Handler.IsOwn() {
				return fmt.Errorf("the runtime handler fsb has user namespaces, and %s has none", cfg.Handler.Name)
			}
			return roots.tryUsers()
		}},
	}
}

func (u *userNamespaces) disabled() bool { return u.mode == "" || u.mode == UsersDisabled }

// on reports whether containers have user namespaces. Once they have, they always do.
func (u *userNamespaces) on() bool { return !u.disabled() && u.missing.result() == nil }

// recheck finds out again whether containers can have user namespaces, if they could not at the last try, and not more often than the probe
// allows.
func (u *userNamespaces) recheck() {
	if !u.disabled() {
		_ = u.missing.recheck()
	}
}

// unusable returns an error if containers must have user namespaces and cannot.
func (u *userNamespaces) unusable() error {
	if u.mode != UsersRequired {
		return nil
	}
	if err := u.missing.result(); err != nil {
		return fault.Wrap(err, errdefs.ErrFailedPrecondition, fault.RuntimeUnavailable, "the pool requires user namespaces: %s", err.Error())
	}
	return nil
}

// Users reports whether containers have user namespaces.
func (r *Runtime) Users() bool { return r.users.on() }

// UsersOff returns why containers have no user namespaces although the pool asks for them; empty if they have, or if it does not ask.
func (r *Runtime) UsersOff() string {
	if r.users.disabled() {
		return ""
	}
	if err := r.users.missing.result(); err != nil {
		return err.Error()
	}
	return ""
}

// take returns the first id of a range for a container; zero if containers have no user namespaces.
func (u *userNamespaces) take(id string) (uint32, error) {
	if err := u.unusable(); err != nil {
		return 0, err
	}
	if !u.on() {
		return 0, nil
	}
	u.mu.Lock()
	if u.unswept != nil {
		u.unswept[id] = true
	}
	u.mu.Unlock()
	first, err := u.ranges.Take(u.owner, id)
	if errors.Is(err, idrange.ErrExhausted) {
		return 0, fault.Wrap(err, errdefs.ErrResourceExhausted, fault.NoCapacity,
			"the node has no range of user ids left: all %d are in use; raise --user-id-ranges of the agents", u.ranges.Count)
	}
	return first, err
}

// release gives back a range that no container was recorded with.
func (u *userNamespaces) release(first uint32, id string) {
	if first != 0 {
		_ = u.ranges.Release(first, id) // otherwise the next process of this agent, or the janitor, does
	}
}

// mapUsers gives a container a user namespace.
func mapUsers(s *specs.Spec, first uint32) {
	if first == 0 {
		return
	}
	ids := []specs.LinuxIDMapping{{HostID: first, Size: idrange.Size}}
	s.Linux.UIDMappings, s.Linux.GIDMappings = ids, ids
	s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
}

// sweepIDs releases the ranges that earlier processes of this agent have taken for containers that they did not record.
func (r *Runtime) sweepIDs(ctx context.Context) error {
	u := r.users
	if u.ranges.Dir == "" {
		return nil
	}
	held, err := u.ranges.List()
	if err != nil {
		return err
	}
	for _, h := range held {
		if h.Owner != u.owner || !identity.IsContainerID(h.ID) || u.isUnswept(h.ID) {
			continue
		}
		_, err := r.client.ContainerService().Get(ctx, h.ID)
		if errdefs.IsNotFound(err) {
			err = r.remover.Remove(ctx, h.ID)
		}
		if err != nil {
			return classify(err, "releasing the user ids of container %s", h.ID)
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.unswept = nil
	return nil
}

func (u *userNamespaces) isUnswept(id string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.unswept[id]
}

// tryUsers makes a user namespace, and an overlay with the owners of it.
func (s *slotRoots) tryUsers() error {
	if err := os.MkdirAll(s.dir, 0o755); err != nil { //nolint:gosec // slots of any user read it
		return fmt.Errorf("user namespaces need a directory on the host: %w", err)
	}
	users, end, err := s.anyUsers()
	if err != nil {
		return fmt.Errorf("the node lets no user namespace be made: %w", err)
	}
	defer end()
	root, err := s.tryOverlay(users)
	if err != nil {
		return fmt.Errorf("the node has no id-mapped mounts below an overlay (Linux 5.19): %w", err)
	}
	return root.Close()
}

// anyUsers returns a user namespace, which a process holds until end is called. It maps nothing but root, to itself: that is all that an agent
// may do.
func (s *slotRoots) anyUsers() (users *os.File, end func(), err error) {
	// sandbox-init waits for its setup.
	local, remote, err := pair()
	if err != nil {
		return nil, nil, err
	}
	defer remote.Close()
	ids := []syscall.SysProcIDMap{{Size: 1}}
	cmd := exec.Command(s.init) //nolint:noctx // it ends with the connection
	cmd.ExtraFiles = []*os.File{remote}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids, Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		_ = local.Close()
		return nil, nil, err
	}
	end = func() {
		_ = local.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	users, err = os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
	if err != nil {
		end()
		return nil, nil, err
	}
	stop := end
	return users, func() { _ = users.Close(); stop() }, nil
}

func pair() (local, remote *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "pair"), os.NewFile(uintptr(fds[1]), "pair"), nil
}
