// Package plan decides which Pods are garbage (seed 003): finished ones above a threshold, terminating ones on nodes that are out
// of service, those of nodes that do not exist, and terminating ones that were never scheduled. It is pure: observations and the
// time are arguments, deletions are the result. A Quarantine belongs to one goroutine; Deletions may be called concurrently.
package plan

import (
	"cmp"
	"slices"
	"time"
)

// The phases of finished Pods, and the reason of evicted ones.
const (
	PhaseSucceeded = "Succeeded"
	PhaseFailed    = "Failed"
	ReasonEvicted  = "Evicted"
)

// Pod is the part of a Pod that decisions use.
type Pod struct {
	Namespace, Name, UID string
	// Node is the name of the node that it is bound to; empty if it was not scheduled.
	Node string
	// Phase and StatusReason are status.phase and status.reason.
	Phase, StatusReason string
	// Created is when it was created.
	Created time.Time
	// Terminating reports whether it has a deletion timestamp.
	Terminating bool
}

// Finished reports whether no container of the Pod runs or will run again.
func (p Pod) Finished() bool { return p.Phase == PhaseSucceeded || p.Phase == PhaseFailed }

func (p Pod) evicted() bool { return p.Phase == PhaseFailed && p.StatusReason == ReasonEvicted }

// Node is the part of a node that decisions use.
type Node struct {
	Name string
	// Ready reports whether its condition Ready is true.
	Ready bool
	// OutOfService reports whether it has the taint node.kubernetes.io/out-of-service, with any value and effect.
	OutOfService bool
}

// Reason is why a Pod is deleted.
type Reason string

// The reasons, in the order in which they are checked.
const (
	// Terminated: it has finished, and more Pods have than are to be kept.
	Terminated Reason = "terminated"
	// OutOfService: it is terminating on a node that is not ready and was declared out of service.
	OutOfService Reason = "out-of-service"
	// Orphaned: its node does not exist.
	Orphaned Reason = "orphaned"
	// Unscheduled: it is terminating and was never bound to a node.
	Unscheduled Reason = "unscheduled"
)

// Reasons returns all reasons.
func Reasons() []Reason { return []Reason{Terminated, OutOfService, Orphaned, Unscheduled} }

// Deletion is a Pod to delete without grace.
type Deletion struct {
	Pod    Pod
	Reason Reason
	// Fail reports whether its phase must be set to Failed first, because it has not finished. If that fails, it is not deleted.
	Fail bool
	// Disrupted reports whether the condition DisruptionTarget is set together with the phase.
	Disrupted bool
}

// Observation is everything that is known at one time.
type Observation struct {
	Pods  []Pod
	Nodes []Node
	// Gone are the nodes that, after their quarantine, the API server reported as not found.
	Gone []string
	// Threshold is the number of finished Pods to keep; 0 or less keeps all.
	Threshold int
}

// Deletions returns the Pods to delete, each once, ordered by reason as Reasons is; finished ones in the order of terminated. The
// order of the observations does not matter.
func Deletions(o Observation) []Deletion {
	out := terminated(o.Pods, o.Threshold)
	taken := make(map[string]bool, len(out))
	for _, d := range out {
		taken[d.Pod.UID] = true
	}
	outOfService, gone := map[string]bool{}, map[string]bool{}
	for _, name := range o.Gone {
		gone[name] = true
	}
	for _, n := range o.Nodes {
		outOfService[n.Name] = n.OutOfService && !n.Ready
		delete(gone, n.Name) // it was registered again
	}
	rest := make([]Deletion, 0)
	for _, p := range o.Pods {
		reason := Reason("")
		switch {
		case taken[p.UID]:
		case p.Terminating && outOfService[p.Node]:
			reason = OutOfService
		case p.Node != "" && gone[p.Node]:
			reason = Orphaned
		case p.Terminating && p.Node == "":
			reason = Unscheduled
		}
		if reason != "" {
			rest = append(rest, Deletion{Pod: p, Reason: reason, Fail: !p.Finished(), Disrupted: reason == Orphaned && !p.Finished()})
		}
	}
	slices.SortFunc(rest, func(a, b Deletion) int {
		return cmp.Or(cmp.Compare(rank(a.Reason), rank(b.Reason)), byAge(a.Pod, b.Pod))
	})
	return append(out, rest...)
}

func rank(r Reason) int { return slices.Index(Reasons(), r) }

// terminated returns the finished Pods above the threshold: evicted ones first, because their Events say all there is to know,
// then the oldest.
func terminated(pods []Pod, threshold int) []Deletion {
	if threshold <= 0 {
		return nil
	}
	var finished []Pod
	for _, p := range pods {
		if p.Finished() {
			finished = append(finished, p)
		}
	}
	if len(finished) <= threshold {
		return nil
	}
	slices.SortFunc(finished, func(a, b Pod) int {
		return cmp.Or(-compareBool(a.evicted(), b.evicted()), byAge(a, b))
	})
	var out []Deletion
	for _, p := range finished[:len(finished)-threshold] {
		out = append(out, Deletion{Pod: p, Reason: Terminated})
	}
	return out
}

// byAge orders by age, then by name. Names repeat between namespaces; the UID makes the order total.
func byAge(a, b Pod) int {
	return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.UID, b.UID))
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	default:
		return 1
	}
}
