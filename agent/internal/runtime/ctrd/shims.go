package ctrd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/sandbox"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/google/uuid"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// shimSize is how many containers share a shim. More would save memory, and lose more sandboxes with a shim.
const shimSize = 32

// checkTimeout bounds the question whether a shim has ended.
const checkTimeout = 5 * time.Second

// shims has the containers of this process by shim of ours, from before they have a record until their task is about to be removed. A shim
// without containers is never joined again, so that it can be ended safely.
type shims struct {
	client  *client.Client
	support *support
	// started is called with that path whenever a shim has been started.
	started func(binary string)
	// owner is the agent's Pod.
	owner string
	size  int

	mu      sync.Mutex
	of      map[string]string // shim by container
	members map[string]int    // by shim; no entry for an empty one
	current string
	left    []string // those that could not be started, and those without a container, of which something may be left
}

func newShims(owner string, s *support, started func(string)) *shims {
	return &shims{client: s.client, owner: owner, size: shimSize, support: s, started: started, of: map[string]string{}, members: map[string]int{}}
}

// join adds a container, unless it is in a shim already, and returns its shim, which it starts if there is none with room for it. mu is held over
// that: others would need the same shim.
func (s *shims) join(ctx context.Context, id string, p *pod) (shim string, added bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if shim, ok := s.of[id]; ok {
		return shim, false, nil
	}
	if n := s.members[s.current]; n == 0 || n >= s.size {
		anchor, err := s.start(ctx, p)
		if err != nil {
			return "", false, err
		}
		s.current = anchor
	}
	s.of[id] = s.current
	s.members[s.current]++
	return s.current, true, nil
}

// leave removes a container. Safe to repeat.
func (s *shims) leave(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	shim, ok := s.of[id]
	if !ok {
		return
	}
	delete(s.of, id)
	if s.members[shim]--; s.members[shim] == 0 {
		delete(s.members, shim)
		s.left = append(s.left, shim)
	}
}

// check reports whether a shim has ended, and then no container joins it again. It reports false if containerd does not say.
func (s *shims) check(ctx context.Context, shim string) (ended bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), checkTimeout)
	defer cancel()
	resp, err := s.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: shim})
	err = errgrpc.ToNative(err)
	switch {
	case err == nil:
		ended = resp.GetProcess().GetStatus() == task.Status_STOPPED
	case errdefs.IsNotFound(err):
		ended = true
	default:
		ended = strings.Contains(err.Error(), "ttrpc: closed") // containerd is about to remove the task
	}
	if !ended {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current == shim {
		s.current = ""
	}
	return true
}

// lost reports whether a container is in a shim that has ended.
func (s *shims) lost(ctx context.Context, id string) bool {
	c, err := s.client.ContainerService().Get(ctx, id)
	return err == nil && identity.IsShimID(c.SandboxID) && s.check(ctx, c.SandboxID)
}

// explain returns the error of a container that could not be started because its shim has ended; other errors as they are.
func (s *shims) explain(ctx context.Context, shim, id string, err error) error {
	if err == nil || !identity.IsShimID(shim) || requestAtFault(err) || !s.check(ctx, shim) {
		return err
	}
	return fault.Wrap(err, errdefs.ErrUnavailable, fault.RuntimeUnavailable, "the shim of container %s has ended; create it again", id)
}

// requestAtFault reports whether a container can never be created.
func requestAtFault(err error) bool {
	return fault.ReasonOf(err) != "" && !errdefs.IsUnavailable(err)
}

// joined reports whether a shim has containers of this process.
func (s *shims) joined(shim string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.members[shim] > 0
}

// start starts a shim: the record that lets containers join it, and its anchor. mu is held. After an error reclaim removes what is left.
func (s *shims) start(ctx context.Context, p *pod) (anchor string, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	if err := s.support.check(ctx); err != nil {
		return "", err
	}
	binary, err := s.support.binary()
	if err != nil {
		return "", err
	}
	id := identity.ShimID(strings.ReplaceAll(uuid.NewString(), "-", "")[:20])
	raw, err := json.Marshal(&specs.Spec{
		Version: specVersion, Annotations: map[string]string{plan.AnchorAnnotation: "true", plan.ShimCgroupAnnotation: p.shims},
	})
	if err != nil {
		return "", fmt.Errorf("encoding the OCI spec of shim %s: %w", id, err)
	}
	spec := &anypb.Any{TypeUrl: specType, Value: raw}
	defer func() {
		if err != nil {
			s.left = append(s.left, id) // no call can be relied on now
		}
	}()
	labels := map[string]string{identity.KeyShim: s.owner}
	if _, err := s.client.SandboxStore().Create(ctx, sandbox.Sandbox{ID: id, Labels: labels, Runtime: sandbox.RuntimeOpts{Name: binary}, Spec: spec}); err != nil {
		return "", classify(err, "recording shim %s", id)
	}
	defer func() {
		if err != nil {
			s.support.forget()
		}
	}()
	record := containers.Container{ID: id, Labels: labels, Runtime: containers.RuntimeInfo{Name: binary}, Spec: spec}
	if _, err := s.client.ContainerService().Create(ctx, record); err != nil {
		return "", classify(err, "recording shim %s", id)
	}
	if _, err := s.client.TaskService().Create(ctx, &tasks.CreateTaskRequest{ContainerID: id}); err != nil {
		return "", notStarted(err, id)
	}
	if _, err := s.client.TaskService().Start(ctx, &tasks.StartRequest{ContainerID: id}); err != nil {
		return "", notStarted(err, id)
	}
	s.started(binary)
	return id, nil
}

// restore writes the record of a shim again that lets containers join it. When containerd starts, its CRI plugin removes the records of sandboxes
// that are not its own. NotFound: the shim has ended.
func (s *shims) restore(ctx context.Context, shim string) error {
	anchor, err := s.client.ContainerService().Get(ctx, shim)
	if err != nil {
		return classify(err, "reading the record of shim %s", shim)
	}
	_, err = s.client.SandboxStore().Create(ctx, sandbox.Sandbox{
		ID: shim, Labels: anchor.Labels, Runtime: sandbox.RuntimeOpts{Name: anchor.Runtime.Name}, Spec: anchor.Spec,
	})
	if errdefs.IsAlreadyExists(err) {
		return nil
	}
	return classify(err, "recording shim %s again", shim)
}

// reclaim ends the shims that no container has joined, or could join: the container that was to be the first, or the last one, may have no
// record from which its removal would know its shim.
func (s *shims) reclaim(ctx context.Context, remover *shared.Remover) error {
	s.mu.Lock()
	left := s.left
	s.left = nil
	s.mu.Unlock()
	var errs []error
	for _, id := range left {
		if err := s.end(ctx, remover, id); err != nil {
			errs = append(errs, err)
			s.mu.Lock()
			s.left = append(s.left, id)
			s.mu.Unlock()
		}
	}
	return errors.Join(errs...)
}

// end ends a shim that no container will join, unless one that was in it still has a record: the removal of that ends the shim.
func (s *shims) end(ctx context.Context, remover *shared.Remover, id string) error {
	_, err := s.client.ContainerService().Get(ctx, id)
	if errdefs.IsNotFound(err) {
		_, err = s.client.SandboxStore().Get(ctx, id)
	}
	if err == nil {
		err = remover.RemovePiece(ctx, shared.Piece{ID: id, Part: shared.PartShim})
	}
	if errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err) {
		return nil
	}
	return err
}

// notStarted classifies the error of a shim that could not be started. Whatever the node lacks, another node may have.
func notStarted(err error, shim string) error {
	err = runtime.Shortage(classify(errgrpc.ToNative(err), "starting shim %s", shim))
	if fault.ReasonOf(err) != "" || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fault.Wrap(err, errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd could not start shim %s; its log says why", shim)
}

// sweep ends the shims that earlier processes of this agent have left without a container.
func (s *shims) sweep(ctx context.Context) error {
	list, err := s.client.ContainerService().List(ctx, fmt.Sprintf("labels.%q==%q", identity.KeyShim, s.owner))
	if err != nil {
		return classify(err, "listing shims")
	}
	if len(list) == 0 {
		return nil
	}
	all, err := s.client.ContainerService().List(ctx, fmt.Sprintf("labels.%q==true", identity.KeyManaged))
	if err != nil {
		return classify(err, "listing containers")
	}
	used := map[string]bool{}
	for _, c := range all {
		used[c.SandboxID] = true
	}
	var errs []error
	for _, c := range list {
		if s.mu.Lock(); !used[c.ID] && c.ID != s.current {
			if err := shared.RemoveAnchor(ctx, s.client, c.ID); err != nil && !errdefs.IsNotFound(err) {
				errs = append(errs, classify(err, "ending shim %s", c.ID))
			}
		}
		s.mu.Unlock()
	}
	return errors.Join(errs...)
}
