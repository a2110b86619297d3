// Package rpc implements JanitorService: it translates between the API's messages and the janitor's findings, one file per call, and
// decides nothing. All methods may be called concurrently.
package rpc

import (
	"cmp"
	"context"
	"slices"
	"time"

	"k8s.io/utils/clock"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// Finding is a container or a remnant with its verdict. Exactly one of Observation and Remnant is set.
type Finding struct {
	// Observation is the evidence about a container, Remnant about a remnant. There is at most one finding per container, and at
	// most one per kind of remnant.
	Observation *verdict.Observation
	Remnant     *verdict.Remnant
	// Verdict is the conclusion; Time is when it was drawn.
	Verdict verdict.Verdict
	Time    time.Time
}

// Order selects what to sweep.
type Order struct {
	// DryRun judges as before a deletion, and deletes nothing.
	DryRun bool
	// IDs are the selected containers; empty means all. A named container has a result even if it is kept.
	IDs map[string]bool
	// Reasons are the selected reasons for deletion; empty means all.
	Reasons map[verdict.Reason]bool
}

// Selects reports whether things with a verdict are to be deleted.
func (o Order) Selects(id string, v verdict.Verdict) bool {
	return v.Action == verdict.Delete && (len(o.IDs) == 0 || o.IDs[id]) && (len(o.Reasons) == 0 || o.Reasons[v.Reason])
}

// Outcome is the result of sweeping one thing.
type Outcome uint8

// The outcomes.
const (
	// Deleted: it was removed with everything that belonged to it.
	Deleted Outcome = iota
	// WouldDelete: it would have been removed, but this is a dry run.
	WouldDelete
	// Kept: it is no orphan, or was not selected.
	Kept
	// Failed: a part of it still exists.
	Failed
)

// Result is what happened to one thing.
type Result struct {
	// Finding is the last one about it.
	Finding Finding
	Outcome Outcome
	// Err is why it failed.
	Err error
	// FreedBytes is the disk space that was freed; zero if it is not known.
	FreedBytes int64
}

// Core is the janitor as the service needs it. All methods may be called concurrently.
type Core interface {
	// Findings returns everything on the node with its verdict, in any order. It makes no requests and does not block for long. The
	// error is errdefs.ErrUnavailable as long as nothing can be judged.
	Findings(ctx context.Context) ([]Finding, error)
	// Changed returns a channel that is closed when Findings may return something else than at the time of the call, other than by
	// the passing of time.
	Changed() <-chan struct{}
	// Sweep scans the node, judges everything by the API server's live answers, and deletes what the order selects. It calls report
	// with a result for each of those, and for each container that the order names. report is called by one goroutine at a time; an
	// error of it, or the end of ctx, ends the sweep after the removal in progress. A failed removal is a result, not an error.
	Sweep(ctx context.Context, o Order, report func(Result) error) error
}

// Config is what a Service needs.
type Config struct {
	// Core does the work.
	Core Core
	// NodeName is the janitor's node.
	NodeName string
	// Clock is the clock; nil means the real one.
	Clock clock.WithTicker
}

// Service implements JanitorService. Create it with New.
type Service struct {
	janitorv1.UnimplementedJanitorServiceServer

	config Config
	// closing is closed when endless streams have to end.
	closing <-chan struct{}
}

// New returns a Service. Endless streams end when closing is closed.
func New(cfg Config, closing <-chan struct{}) *Service {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	return &Service{config: cfg, closing: closing}
}

// Rules returns what a user needs for each method: rights on nodes/orphans of fast-sandbox.io, which are not objects. A node has the
// containers of all namespaces.
func Rules() map[string]rpc.Rule {
	rule := func(verb string) rpc.Rule {
		return rpc.Rule{Access: auth.Access{Verb: verb, Group: v1alpha1.Group, Resource: "nodes", Subresource: "orphans"}}
	}
	return map[string]rpc.Rule{
		janitorv1.JanitorService_ListVerdicts_FullMethodName:  rule("list"),
		janitorv1.JanitorService_WatchVerdicts_FullMethodName: rule("watch"),
		janitorv1.JanitorService_Sweep_FullMethodName:         rule("delete"),
	}
}

// key identifies findings.
type key struct {
	id   string
	kind int // of a remnant; -1 for a container
}

func (f *Finding) key() key {
	if f.Remnant != nil {
		return key{f.Remnant.ContainerID, int(f.Remnant.Kind)}
	}
	return key{f.Observation.ContainerID, -1}
}

func compare(a, b key) int {
	return cmp.Or(cmp.Compare(a.id, b.id), cmp.Compare(a.kind, b.kind))
}

// selection is a filter for verdicts; an empty one selects all.
type selection struct {
	actions []janitorv1.Action
	reasons []janitorv1.Reason
}

func (s selection) has(v verdict.Verdict) bool {
	return (len(s.actions) == 0 || slices.Contains(s.actions, action(v.Action))) &&
		(len(s.reasons) == 0 || slices.Contains(s.reasons, reason(v.Reason)))
}

// findings returns the selected findings in their order.
func (s *Service) findings(ctx context.Context, wanted selection) ([]Finding, error) {
	all, err := s.config.Core.Findings(ctx)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(slices.Clone(all), func(f Finding) bool { return !wanted.has(f.Verdict) })
	slices.SortFunc(all, func(a, b Finding) int { return compare(a.key(), b.key()) })
	return all, nil
}
