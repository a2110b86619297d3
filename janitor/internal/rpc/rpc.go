// Package rpc serves JanitorService: it translates between the API's messages and the janitor's findings, one file for each
// call, and decides nothing. It may be called concurrently.
package rpc

import (
	"cmp"
	"context"
	"slices"
	"time"

	"k8s.io/utils/clock"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// Finding is one thing on the node with what was made of it. Exactly one of Observation and Remnant is set.
type Finding struct {
	// Observation is what was seen of a container, Remnant what was seen of something without one. There is at most one
	// finding of a container, and at most one of a kind of remnant of it.
	Observation *verdict.Observation
	Remnant     *verdict.Remnant
	// Verdict is what follows from that; Time is when it was judged.
	Verdict verdict.Verdict
	Time    time.Time
}

// Order says what to sweep.
type Order struct {
	// DryRun judges as before a deletion, and deletes nothing.
	DryRun bool
	// IDs are the containers that are meant; none for all. Of those that are named, a result is wanted also if they are kept.
	IDs map[string]bool
	// Reasons are the reasons to delete that are meant; none for all.
	Reasons map[verdict.Reason]bool
}

// Selects tells whether what is judged so is meant to be deleted.
func (o Order) Selects(id string, v verdict.Verdict) bool {
	return v.Action == verdict.Delete && (len(o.IDs) == 0 || o.IDs[id]) && (len(o.Reasons) == 0 || o.Reasons[v.Reason])
}

// Outcome is what became of a thing in a sweep.
type Outcome uint8

// The outcomes.
const (
	// Deleted: it is gone, with all that belonged to it.
	Deleted Outcome = iota
	// WouldDelete: it would be, were this no dry run.
	WouldDelete
	// Kept: it is not to be deleted, or not selected.
	Kept
	// Failed: something of it is still there.
	Failed
)

// Result is what became of one thing.
type Result struct {
	// Finding is the last look at it.
	Finding Finding
	Outcome Outcome
	// Err says why it failed.
	Err error
	// FreedBytes is what it took on the disk; zero where that is not known.
	FreedBytes int64
}

// Core is what the service needs of the janitor. All of it may be called concurrently.
type Core interface {
	// Findings judges everything on the node by what is known at this moment, in any order. It asks nobody and does not
	// block for long. The error is errdefs.ErrUnavailable while there is nothing yet to judge by.
	Findings(ctx context.Context) ([]Finding, error)
	// Changed returns a channel that is closed as soon as Findings may answer otherwise than at the time of the call, by more
	// than the time that passes.
	Changed() <-chan struct{}
	// Sweep scans the node and judges everything by the API server's own word; it deletes what the order selects, and tells of
	// each of those, and of all that it names, whatever becomes of it. tell is called by one goroutine at a time; an error of
	// it, or the end of ctx, ends the sweep after what is being done. A thing that cannot be deleted is a result, no error.
	Sweep(ctx context.Context, o Order, tell func(Result) error) error
}

// Config is what a Service needs.
type Config struct {
	// Core does the work.
	Core Core
	// NodeName is the node that all of it is about.
	NodeName string
	// Clock; nil is the real one.
	Clock clock.WithTicker
}

// Service is the janitor's API. Make it with New.
type Service struct {
	janitorv1.UnimplementedJanitorServiceServer

	config Config
	// closing is closed when streams without an end of their own have to end.
	closing <-chan struct{}
}

// New returns a Service. Streams that have no end of their own end when closing is closed.
func New(cfg Config, closing <-chan struct{}) *Service {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	return &Service{config: cfg, closing: closing}
}

// Allow says who may call what: people, and nobody of the mesh.
func Allow() map[string][]rpc.Role {
	return map[string][]rpc.Role{janitorv1.JanitorService_ServiceDesc.ServiceName: {rpc.RoleClient}}
}

// key tells findings apart.
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

// selection is which verdicts a caller wants; nothing selects all.
type selection struct {
	actions []janitorv1.Action
	reasons []janitorv1.Reason
}

func (s selection) has(v verdict.Verdict) bool {
	return (len(s.actions) == 0 || slices.Contains(s.actions, action(v.Action))) &&
		(len(s.reasons) == 0 || slices.Contains(s.reasons, reason(v.Reason)))
}

// findings are those that are selected, in their order.
func (s *Service) findings(ctx context.Context, wanted selection) ([]Finding, error) {
	all, err := s.config.Core.Findings(ctx)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(slices.Clone(all), func(f Finding) bool { return !wanted.has(f.Verdict) })
	slices.SortFunc(all, func(a, b Finding) int { return compare(a.key(), b.key()) })
	return all, nil
}
