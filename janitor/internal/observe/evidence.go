package observe

import (
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// resource is a Sandbox as verdicts use it, with its metadata.uid.
type resource struct {
	verdict.Resource
	uid string
}

// evidence is what is known about the node, and the verdicts that follow from it. It makes no requests: what has to be requested
// goes into the queues. The mutex of NodeState guards everything but the first four fields; it is held in all methods.
type evidence struct {
	config Config
	clock  clock.WithTicker
	looks  workqueue.TypedDelayingInterface[look]
	asks   workqueue.TypedDelayingInterface[string] // containers whose Sandboxes are to be requested from the API server

	inventory inventory
	agents    agents
	resources map[name]resource
	// synced: all Pods and Sandboxes of the API server were received; scanned: all containers were listed.
	synced, scanned bool
	changed         chan struct{} // closed at the next change
}

// look is a container to examine: by asking containerd (refresh), or with what is known.
type look struct {
	key     Key
	refresh bool
}

// unready returns what is missing for readiness.
func (v *evidence) unready() error {
	switch {
	case !v.scanned:
		return fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "the containers of this node have not been listed yet")
	case !v.synced:
		return fault.New(errdefs.ErrUnavailable, fault.APIUnavailable, "the Pods and Sandboxes of the API server have not been received yet")
	}
	return nil
}

// notify wakes up all that wait for a change.
func (v *evidence) notify() {
	close(v.changed)
	v.changed = make(chan struct{})
}

// put records a container as containerd returned it.
func (v *evidence) put(c Container, seen time.Time) *entry {
	if e := v.inventory.containers[c.ID]; c.Defect != "" && (e == nil || c.Defect != e.container.Defect) {
		v.config.Log.Info("container has inconsistent labels", obs.KeyContainer, c.ID, obs.KeyAgentUID, c.Identity.AgentUID, obs.KeyReason, c.Defect)
	}
	return v.inventory.put(c, seen)
}

// drop removes a container that no longer exists.
func (v *evidence) drop(id string) {
	if v.inventory.drop(id) {
		v.notify()
	}
}

// replace records a list of all containers. A container that was examined after the list was requested is newer.
func (v *evidence) replace(list Listing, asked time.Time) {
	v.agents.running = list.Pods
	there := make(map[string]bool, len(list.Containers))
	for _, c := range list.Containers {
		there[c.ID] = true
		if e := v.inventory.containers[c.ID]; e == nil || e.seen.Before(asked) {
			v.put(c, asked)
		}
	}
	for id, e := range v.inventory.containers {
		if !there[id] && e.seen.Before(asked) {
			v.drop(id)
		}
	}
	if !v.scanned {
		v.notify()
	}
}
