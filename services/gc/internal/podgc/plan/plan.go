// Package plan decides which Pods are garbage, as seed 003 says: finished ones beyond a number, terminating ones on nodes
// that are out of service, those of nodes that are no more, and terminating ones that never had a node. It is pure: what
// was observed and the time come in, deletions go out. A Quarantine belongs to one goroutine; Deletions may be called by
// many.
package plan

import (
	"cmp"
	"slices"
	"time"
)

// Phases that end a Pod, and the reason of one that was evicted.
const (
	PhaseSucceeded = "Succeeded"
	PhaseFailed    = "Failed"
	ReasonEvicted  = "Evicted"
)

// Pod is what counts of a Pod.
type Pod struct {
	Namespace, Name, UID string
	// Node is the name of the node that it is bound to; empty if it is bound to none.
	Node string
	// Phase and StatusReason are status.phase and status.reason.
	Phase, StatusReason string
	// Created is when it was created.
	Created time.Time
	// Terminating tells that it has a deletion timestamp.
	Terminating bool
}

// Finished tells that no container of the Pod runs or ever will again.
func (p Pod) Finished() bool { return p.Phase == PhaseSucceeded || p.Phase == PhaseFailed }

func (p Pod) evicted() bool { return p.Phase == PhaseFailed && p.StatusReason == ReasonEvicted }

// Node is what counts of a node.
type Node struct {
	Name string
	// Ready tells that its condition Ready is true.
	Ready bool
	// OutOfService tells that it has the taint node.kubernetes.io/out-of-service, with whatever value and effect.
	OutOfService bool
}

// Reason is why a Pod is deleted.
type Reason string

// All reasons, in the order in which they are looked for.
const (
	// Terminated: it has finished, and more have than are to be kept.
	Terminated Reason = "terminated"
	// OutOfService: it is terminating on a node that is not ready and was declared out of service.
	OutOfService Reason = "out-of-service"
	// Orphaned: its node is no more.
	Orphaned Reason = "orphaned"
	// Unscheduled: it is terminating and was bound to no node that could end it.
	Unscheduled Reason = "unscheduled"
)

// Reasons are all of them.
func Reasons() []Reason { return []Reason{Terminated, OutOfService, Orphaned, Unscheduled} }

// Deletion is one Pod that is to go, at once and without grace.
type Deletion struct {
	Pod    Pod
	Reason Reason
	// Fail tells that its phase has to be set to Failed before, for it has not finished. If that fails it is not deleted.
	Fail bool
	// Disrupted tells that the condition DisruptionTarget goes along with the phase.
	Disrupted bool
}

// Observation is all that is known at one time.
type Observation struct {
	Pods  []Pod
	Nodes []Node
	// Gone are the nodes of which the API server itself said, after their quarantine, that they do not exist.
	Gone []string
	// Threshold is how many finished Pods are kept; 0 or less keeps all.
	Threshold int
}

// Deletions are the Pods that are to go, each once, ordered by reason as Reasons is; finished ones in the order in which
// they are given up. The order of what was observed does not matter.
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
		delete(gone, n.Name) // it is back
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

// terminated gives up the finished Pods beyond the threshold: evicted ones first, which have nothing to tell that their
// Event did not, then the oldest.
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

// byAge has the oldest first, then goes by name. Names repeat between namespaces; the UID makes the order total.
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
