// Package observe keeps the janitor's picture of its node: the containers and what is left of containers, from containerd
// and the host; the Pods of the node and the Sandboxes that say that they run there, from the API server. Each thing on the
// node is judged (package verdict) whenever something changes that its verdict rests on. It deletes nothing: an orphan is
// told to whoever sweeps, who has it confirmed here, by a look at containerd and at the API server itself, before the act.
//
//	containerd's events ---> one container ---+
//	a scan each minute ----> all of them -----+--> judged --> orphan --> sweep --> Confirm --> removed
//	Pods, Sandboxes -------> those they mean -+      |
//	time (grace) ----------> one container ---+      +--> findings, for people
//
// What is healthy costs no request to the API server. All methods may be called concurrently.
package observe

import (
	"context"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/protobuf/types/known/anypb"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// Node is what is asked of the node: containerd and the host.
type Node interface {
	// List returns all containers that carry our label, and the uids of the Pods of which the node runs a container.
	List(ctx context.Context) (Listing, error)
	// Get returns one container; errdefs.ErrNotFound if there is none.
	Get(ctx context.Context, id string) (Container, error)
	// Runs tells whether the node runs a container of a Pod.
	Runs(ctx context.Context, podUID string) (bool, error)
	// Events calls changed for each container that may have changed, until ctx ends or the stream breaks, which is an error.
	// ready is called once, when no change is missed any more.
	Events(ctx context.Context, ready func(), changed func(id string)) error
	// Survey finds what is named after our containers but those that are known, of which it need read nothing; what it returns
	// beside an error is as good as without.
	Survey(ctx context.Context, known map[string]bool) ([]ctrd.Piece, error)
}

// API is what is asked of the API server itself, past all caches.
type API interface {
	// Pods returns the uids of the Pods of this node that have not ended.
	Pods(ctx context.Context) (map[string]bool, error)
	// Sandbox returns a Sandbox, nil if there certainly is none.
	Sandbox(ctx context.Context, namespace, name string) (*v1alpha1.Sandbox, error)
}

// Container is what containerd says of one container.
type Container struct {
	ID string
	// Managed tells that it carries our label.
	Managed bool
	// Identity and Defect are what its labels say; see verdict.Observation.
	Identity identity.Identity
	Defect   string
	// State is what runs of it.
	State verdict.Container
	// CreatedAt is when its record was made.
	CreatedAt time.Time
	// Record is the record of its sandbox, nil for a slot. Set by Get alone.
	Record *anypb.Any
}

// Listing is what a node has at one moment.
type Listing struct {
	Containers []Container
	// Pods are the uids of the Pods of which the node runs a container.
	Pods map[string]bool
}

// Key names a thing on the node: a container, or what is left of a kind of one that has no record.
type Key struct {
	ID      string
	Remnant bool
	Kind    verdict.Kind
}

// Finding is one thing with what was made of it; one of Observation and Remnant is set. It is not changed once returned.
type Finding struct {
	Key         Key
	Observation *verdict.Observation
	Remnant     *verdict.Remnant
	Verdict     verdict.Verdict
	// Time is when it was judged.
	Time time.Time
	// Orphan is when it was first judged to be deleted, without a break since; zero if it is not.
	Orphan time.Time
	// Pieces are what a remnant consists of.
	Pieces []ctrd.Piece
	// ResourceUID is the metadata.uid of the Sandbox of its name, where there is one.
	ResourceUID string
	// Traceparent is that of the call that created the container; known after Confirm alone.
	Traceparent string
}

// Config is what a Board needs.
type Config struct {
	Node Node
	API  API
	// Policy is what is judged by.
	Policy verdict.Policy
	// ScanInterval is the time between full scans.
	ScanInterval time.Duration
	// Orphan is told of each thing that is to be deleted, or may be by the API server's own word: when it is found to be, and at
	// each scan. It must not block, nor call back.
	Orphan func(Key)
	// Metrics of the scans; see NewMetrics.
	Metrics *Metrics
	// Clock; nil is the real one.
	Clock clock.WithTicker
	Log   logr.Logger
}
