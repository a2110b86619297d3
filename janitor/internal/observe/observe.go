// Package observe keeps the state of the janitor's node: containers and remnants of containers, from containerd and the host; the
// Pods of the node and the Sandboxes that are assigned to it, from the API server. Everything on the node is judged (package
// verdict) whenever something changes that its verdict depends on. The package deletes nothing: it reports orphans to the
// sweeper, which calls Confirm, a check against containerd and the API server themselves, before it removes anything.
//
//	containerd's events ---> one container ----+
//	a scan every minute ---> all of them ------+--> judged --> orphan --> sweep --> Confirm --> removed
//	Pods, Sandboxes -------> their containers -+       |
//	time (grace period) ---> one container ----+       +--> findings, for people
//
// Healthy containers cause no requests to the API server. All methods may be called concurrently.
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

// Node is the node: containerd and the host.
type Node interface {
	// List returns all managed containers, and the uids of the Pods of which the node runs a container.
	List(ctx context.Context) (Listing, error)
	// Get returns one container, or errdefs.ErrNotFound.
	Get(ctx context.Context, id string) (Container, error)
	// Runs reports whether the node runs a container of a Pod.
	Runs(ctx context.Context, podUID string) (bool, error)
	// Events calls changed for each container that may have changed, until ctx ends or the stream breaks, which is an error. It
	// calls ready once, when no further change can be missed.
	Events(ctx context.Context, ready func(), changed func(id string)) error
	// Survey returns everything that is named like a managed container, except for the known ones. A result beside an error is valid
	// but incomplete.
	Survey(ctx context.Context, known map[string]bool) ([]ctrd.Piece, error)
}

// API is the API server, uncached.
type API interface {
	// Pods returns the uids of the Pods of this node that have not ended.
	Pods(ctx context.Context) (map[string]bool, error)
	// Sandbox returns a Sandbox, or nil if it certainly does not exist.
	Sandbox(ctx context.Context, namespace, name string) (*v1alpha1.Sandbox, error)
}

// Container is a container as containerd returned it.
type Container struct {
	ID string
	// Managed reports whether it has the label fast-sandbox.io/managed=true.
	Managed bool
	// Identity and Defect are read from its labels; see verdict.Observation.
	Identity identity.Identity
	Defect   string
	// State is the state of its task.
	State verdict.Container
	// CreatedAt is when its record was created.
	CreatedAt time.Time
	// Record is the record of its sandbox; nil for a slot. Only Get sets it.
	Record *anypb.Any
}

// Listing is the result of List.
type Listing struct {
	Containers []Container
	// Pods are the uids of the Pods of which the node runs a container.
	Pods map[string]bool
}

// Key identifies a container, or a remnant by the id and the kind.
type Key struct {
	ID      string
	Remnant bool
	Kind    verdict.Kind
}

// Finding is a container or a remnant with its verdict; one of Observation and Remnant is set. It is immutable.
type Finding struct {
	Key         Key
	Observation *verdict.Observation
	Remnant     *verdict.Remnant
	Verdict     verdict.Verdict
	// Time is when it was judged.
	Time time.Time
	// Orphan is since when its verdict has been Delete without interruption; zero if it is not.
	Orphan time.Time
	// Pieces are the parts of a remnant.
	Pieces []ctrd.Piece
	// ResourceUID is the metadata.uid of the Sandbox with its name, if there is one.
	ResourceUID string
	// Traceparent is the trace context of the call that created the container; only Confirm sets it.
	Traceparent string
}

// Config is what a NodeState needs.
type Config struct {
	Node Node
	API  API
	// Policy is the janitor's policy.
	Policy verdict.Policy
	// ScanInterval is the interval between full scans.
	ScanInterval time.Duration
	// Orphan is called for each thing that is to be deleted, or that only the API server's answer can decide: when it is found, and
	// at each scan. It must not block, and must not call back.
	Orphan func(Key)
	// Metrics of the scans; see NewMetrics.
	Metrics *Metrics
	// Clock is the clock; nil means the real one.
	Clock clock.WithTicker
	Log   logr.Logger
}
