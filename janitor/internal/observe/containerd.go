package observe

import (
	"context"
	"fmt"
	"strings"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// podUIDLabel is the label of containerd's CRI plugin for the uid of a container's Pod.
const podUIDLabel = "io.kubernetes.pod.uid"

// Containerd implements Node.
type Containerd struct {
	// Remover has containerd's client, and the host's directories.
	Remover *ctrd.Remover
}

var _ Node = (*Containerd)(nil)

// List implements Node. It makes one call for all relevant containers and one for all tasks.
func (n *Containerd) List(ctx context.Context) (Listing, error) {
	client := n.Remover.Client
	found, err := client.ContainerService().List(ctx, managedFilter(), fmt.Sprintf("labels.%q", podUIDLabel))
	if err != nil {
		return Listing{}, fmt.Errorf("listing containers: %w", err)
	}
	states, err := n.states(ctx)
	if err != nil {
		return Listing{}, err
	}
	list := Listing{Pods: map[string]bool{}}
	for _, c := range found {
		state, ok := states[c.ID]
		if c.Labels[identity.KeyManaged] == "true" {
			list.Containers = append(list.Containers, read(c, state, ok))
		} else if ok && state != verdict.Stopped {
			list.Pods[c.Labels[podUIDLabel]] = true
		}
	}
	return list, nil
}

func managedFilter() string { return fmt.Sprintf("labels.%q==true", identity.KeyManaged) }

func (n *Containerd) states(ctx context.Context) (map[string]verdict.Container, error) {
	resp, err := n.Remover.Client.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return nil, fmt.Errorf("listing tasks: %w", errgrpc.ToNative(err))
	}
	out := make(map[string]verdict.Container, len(resp.GetTasks()))
	for _, t := range resp.GetTasks() {
		out[t.GetID()] = stateOf(t.GetStatus())
	}
	return out, nil
}

// stateOf converts a status. An unknown one counts as running.
func stateOf(s task.Status) verdict.Container {
	switch s {
	case task.Status_CREATED:
		return verdict.Created
	case task.Status_STOPPED:
		return verdict.Stopped
	}
	return verdict.Running
}

// Get implements Node.
func (n *Containerd) Get(ctx context.Context, id string) (Container, error) {
	c, err := n.Remover.Client.ContainerService().Get(ctx, id)
	if err != nil {
		return Container{}, fmt.Errorf("getting container %s: %w", id, err)
	}
	resp, err := n.Remover.Client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: id})
	if err = errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) {
		return Container{}, fmt.Errorf("getting the task of container %s: %w", id, err)
	}
	return read(c, stateOf(resp.GetProcess().GetStatus()), err == nil), nil
}

// Runs implements Node.
func (n *Containerd) Runs(ctx context.Context, podUID string) (bool, error) {
	found, err := n.Remover.Client.ContainerService().List(ctx, fmt.Sprintf("labels.%q==%q", podUIDLabel, podUID))
	if err != nil || len(found) == 0 {
		return false, err
	}
	states, err := n.states(ctx)
	if err != nil {
		return false, err
	}
	for _, c := range found {
		if state, ok := states[c.ID]; ok && state != verdict.Stopped {
			return true, nil
		}
	}
	return false, nil
}

// Survey implements Node.
func (n *Containerd) Survey(ctx context.Context, known map[string]bool) ([]ctrd.Piece, error) {
	return n.Remover.InventoryExcept(ctx, known)
}

// read converts a container's record.
func read(c containers.Container, state verdict.Container, hasTask bool) Container {
	out := Container{ID: c.ID, Managed: c.Labels[identity.KeyManaged] == "true", State: state, CreatedAt: c.CreatedAt}
	if !hasTask {
		out.State = verdict.NoTask
	}
	id, err := identity.Parse(c.Labels)
	switch {
	case err != nil:
		out.Defect = err.Error()
	case !id.Fits(c.ID):
		out.Defect = fmt.Sprintf("its id is not that of attempt %d of sandbox %s", id.Attempt, id.SandboxUID)
	}
	if out.Identity = id; out.Defect != "" {
		out.Identity = identity.Identity{AgentUID: c.Labels[identity.KeyAgentUID]}
	}
	if r, ok := c.Extensions[ctrd.RecordKey]; ok {
		out.Record = &anypb.Any{TypeUrl: r.GetTypeUrl(), Value: r.GetValue()}
	}
	return out
}

// Events implements Node. It follows the events of containers and of their tasks.
func (n *Containerd) Events(ctx context.Context, ready func(), changed func(id string)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	namespace := n.Remover.Client.DefaultNamespace()
	stream, errs := n.Remover.Client.EventService().Subscribe(ctx,
		fmt.Sprintf(`namespace==%q,topic~="^/containers/"`, namespace), fmt.Sprintf(`namespace==%q,topic~="^/tasks/"`, namespace))
	ready()
	for {
		select {
		case e := <-stream:
			if e == nil {
				return fmt.Errorf("following events: %w", errdefs.ErrUnavailable)
			}
			if id := containerOf(e.Event); id != "" && (identity.IsContainerID(id) || strings.HasPrefix(e.Topic, "/containers/")) {
				changed(id)
			}
		case err := <-errs:
			if err == nil {
				err = errdefs.ErrUnavailable
			}
			return fmt.Errorf("following events: %w", err)
		}
	}
}

// containerOf returns the container that an event is about; "" if it is about none, or about a process other than the container's
// first.
func containerOf(raw typeurl.Any) string {
	event, err := typeurl.UnmarshalAny(raw)
	if err != nil {
		return ""
	}
	switch e := event.(type) {
	case *events.ContainerCreate:
		return e.GetID()
	case *events.ContainerUpdate:
		return e.GetID()
	case *events.ContainerDelete:
		return e.GetID()
	case *events.TaskCreate:
		return e.GetContainerID()
	case *events.TaskStart:
		return e.GetContainerID()
	case *events.TaskDelete:
		if e.GetID() == "" || e.GetID() == e.GetContainerID() {
			return e.GetContainerID()
		}
	case *events.TaskExit:
		if e.GetID() == e.GetContainerID() {
			return e.GetContainerID()
		}
	}
	return ""
}
