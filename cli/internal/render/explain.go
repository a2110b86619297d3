package render

import (
	"fmt"
	"io"
	"slices"
	"strings"

	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
)

// stateText explains a state.
func stateText(s gcv1.State) string {
	switch s {
	case gcv1.State_STATE_FREE:
		return "it has no owner; only a request deletes it"
	case gcv1.State_STATE_OWNED:
		return "an owner keeps it"
	case gcv1.State_STATE_UNCLEAR:
		return "whether one of its owners exists is not known, so it is kept"
	case gcv1.State_STATE_DOOMED:
		return "its owners are deleted or wait for its deletion, so it is about to be deleted"
	case gcv1.State_STATE_AWAITS_DEPENDENTS:
		return "it is being deleted and waits for the dependents that block it"
	case gcv1.State_STATE_AWAITS_ORPHANING:
		return "it is being deleted and waits until no dependent refers to it"
	case gcv1.State_STATE_AWAITS_FINALIZERS:
		return "it is being deleted and waits for the finalizers of other components"
	case gcv1.State_STATE_TERMINATING:
		return "it is being deleted, and no finalizer blocks it"
	}
	return "its state is not known"
}

// causeText explains a cause.
func causeText(c gcv1.Cause) string {
	switch c {
	case gcv1.Cause_CAUSE_OWNERS_GONE:
		return "all of its owners are deleted or wait for its deletion"
	case gcv1.Cause_CAUSE_OWNERS_WAIT:
		return "an owner waits for its deletion, and it has dependents"
	case gcv1.Cause_CAUSE_DANGLING_OWNERS:
		return "some of its owners are deleted or being deleted, but not all"
	case gcv1.Cause_CAUSE_ORPHANED:
		return "an owner is deleted with the policy Orphan"
	case gcv1.Cause_CAUSE_WAIT_CYCLE:
		return "it waits for dependents that, directly or not, wait for it"
	case gcv1.Cause_CAUSE_DEPENDENTS_GONE:
		return "no dependent blocks its deletion"
	case gcv1.Cause_CAUSE_DEPENDENTS_ORPHANED:
		return "no dependent refers to it"
	case gcv1.Cause_CAUSE_DOUBTFUL:
		return "a list no longer contains it"
	case gcv1.Cause_CAUSE_POD_TERMINATED:
		return "more Pods have finished than are kept"
	case gcv1.Cause_CAUSE_POD_OUT_OF_SERVICE:
		return "its node is out of service"
	case gcv1.Cause_CAUSE_POD_ORPHANED:
		return "its node does not exist"
	case gcv1.Cause_CAUSE_POD_UNSCHEDULED:
		return "it is being deleted and was never scheduled"
	}
	return ""
}

// nextText explains the next action of the collector; empty if there is none.
func nextText(s *gcv1.Step) string {
	var what string
	switch s.GetVerb() {
	case gcv1.Verb_VERB_VERIFY:
		what = "ask the API server whether it exists"
	case gcv1.Verb_VERB_DELETE:
		what = "delete it (" + strings.ToLower(word(s.GetPolicy().String(), policyPrefix)) + ")"
	case gcv1.Verb_VERB_PATCH:
		what = "remove owner references from it"
	case gcv1.Verb_VERB_FINALIZE:
		what = "remove the finalizer " + s.GetFinalizer() + " from it"
	default:
		return ""
	}
	if s.GetCause() == gcv1.Cause_CAUSE_UNSPECIFIED {
		return what
	}
	return what + ": " + causeText(s.GetCause())
}

// Explanation writes why an object is kept, waits or is deleted, for people.
func Explanation(w io.Writer, x *gcv1.ExplainObjectResponse) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s, %s\n", fullName(x.GetObject().GetPlace()), word(x.GetState().String(), "STATE_"), stateText(x.GetState()))
	ownersTree(&b, x)
	if len(x.GetOwners()) > 0 {
		b.WriteString("\n")
		if err := ownersTable(x).Flush(&b); err != nil {
			return err
		}
	}
	list := func(title string, items []string) {
		if len(items) > 0 {
			fmt.Fprintf(&b, "\n%s\n", title)
		}
		for _, item := range items {
			fmt.Fprintf(&b, "  - %s\n", item)
		}
	}
	var blockers []string
	for _, o := range x.GetBlockers() {
		blockers = append(blockers, fullName(o.GetPlace()))
	}
	if more := int(x.GetBlockerCount()) - len(blockers); more > 0 {
		blockers = append(blockers, fmt.Sprintf("and %d more", more))
	}
	list("Dependents that it waits for:", blockers)
	list("Finalizers of other components that block it:", x.GetFinalizers())
	if next := nextText(x.GetNext()); next != "" {
		fmt.Fprintf(&b, "\nNext action of the collector: %s\n", next)
	}
	list("What would unblock its deletion:", x.GetUnblock())
	_, err := io.WriteString(w, b.String())
	return err
}

// ownersTree draws the path from the first owner to the object; nothing if no owner keeps it.
func ownersTree(b *strings.Builder, x *gcv1.ExplainObjectResponse) {
	if len(x.GetPath()) == 0 {
		return
	}
	way := append([]*gcv1.Object{x.GetObject()}, x.GetPath()...)
	slices.Reverse(way)
	b.WriteString("\n")
	for i, o := range way {
		indent := ""
		if i > 0 {
			indent = strings.Repeat("   ", i-1) + "└─ "
		}
		note := ""
		if o.GetDeleting() {
			note = " (being deleted)"
		}
		fmt.Fprintf(b, "  %s%s%s\n", indent, objectName(o.GetPlace()), note)
	}
}

func ownersTable(x *gcv1.ExplainObjectResponse) *Table {
	t := NewTable("OWNER", "STANDING", "BLOCKS", "CONTROLLER", "UID")
	for _, o := range x.GetOwners() {
		t.Add(objectName(o.GetPlace()), word(o.GetStanding().String(), "STANDING_"), yesNo(o.GetBlock()), yesNo(o.GetController()), o.GetUid())
	}
	return t
}
