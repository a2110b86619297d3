package render

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
)

// Verdicts returns an empty table of verdicts.
func Verdicts(c Columns) *Table {
	header := []string{"NODE", "KIND", "CONTAINER", "SANDBOX", "ACTION", "REASON", "AGE"}
	if c.Event {
		header = append([]string{"EVENT"}, header...)
	}
	if c.Wide {
		header = append(header, "TASK", "AGENT", "RESOURCE", "MISSING", "FENCE", "POOL", "PERSISTED", "DEFECT")
	}
	return NewTable(header...)
}

// VerdictRow returns the row of a verdict in a table of the same columns.
func VerdictRow(c Columns, event string, v *janitorv1.Verdict) []string {
	row := append(subject(v), VerdictAction(v.GetAction()), VerdictReason(v.GetReason()), verdictAge(v))
	if c.Event {
		row = append([]string{event}, row...)
	}
	if !c.Wide {
		return row
	}
	o := v.GetObservation()
	if o == nil {
		return append(row, "", word(v.GetRemnant().GetAgent().String(), "AGENT_STATE_"), "", "", "", "", "", "")
	}
	return append(row, word(o.GetState().String(), "CONTAINER_STATE_"), word(o.GetAgent().String(), "AGENT_STATE_"),
		word(o.GetResource().GetState().String(), "RESOURCE_STATE_"), seconds(o.GetMissing().AsDuration()),
		word(o.GetFence().String(), "FENCE_OUTCOME_"), o.GetIdentity().GetPool(), fmt.Sprint(o.GetIdentity().GetPersisted()), o.GetDefect())
}

// Sweeps returns an empty table of the results of a sweep.
func Sweeps() *Table {
	return NewTable("NODE", "KIND", "CONTAINER", "SANDBOX", "OUTCOME", "REASON", "MESSAGE")
}

// SweepRow returns the row of a result.
func SweepRow(r *janitorv1.SweepResponse) []string {
	return append(subject(r.GetVerdict()), SweepOutcome(r.GetOutcome()), VerdictReason(r.GetVerdict().GetReason()), r.GetMessage())
}

// subject returns the first columns of a verdict: node, kind, container and sandbox.
func subject(v *janitorv1.Verdict) []string {
	sandbox := ""
	if id := v.GetObservation().GetIdentity(); id.GetName() != "" {
		sandbox = id.GetNamespace() + "/" + id.GetName()
	}
	return []string{v.GetNodeName(), VerdictKind(v), v.GetContainerId(), sandbox}
}

// VerdictKind returns the kind of a verdict's subject: container, slot, or the kind of remnant.
func VerdictKind(v *janitorv1.Verdict) string {
	switch {
	case v.GetRemnant() != nil:
		return strings.ToLower(word(v.GetRemnant().GetKind().String(), "REMNANT_KIND_"))
	case v.GetObservation().GetIdentity().GetSlot():
		return "slot"
	case v.GetObservation() != nil:
		return "container"
	}
	return ""
}

// verdictAge returns the age of a container, or how long a remnant has had no container.
func verdictAge(v *janitorv1.Verdict) string {
	d := v.GetObservation().GetAge()
	if v.GetRemnant() != nil {
		d = v.GetRemnant().GetSince()
	}
	at := v.GetTime().AsTime()
	return Age(at.Add(-d.AsDuration()), at)
}

// seconds returns a duration in seconds; empty for none.
func seconds(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return d.Round(time.Second).String()
}

// VerdictAction returns an action as a word: Delete.
func VerdictAction(a janitorv1.Action) string { return word(a.String(), "ACTION_") }

// VerdictReason returns a reason as a word: AgentPodGone.
func VerdictReason(r janitorv1.Reason) string { return word(r.String(), "REASON_") }

// SweepOutcome returns an outcome as a word: WouldDelete.
func SweepOutcome(o janitorv1.SweepResponse_Outcome) string { return word(o.String(), "OUTCOME_") }

// VerdictActions returns the words of all actions.
func VerdictActions() []string { return words(janitorv1.Action(0), "ACTION_") }

// VerdictReasons returns the words of all reasons.
func VerdictReasons() []string { return words(janitorv1.Reason(0), "REASON_") }

// ParseAction returns the action of a word, in any case, with or without dashes; false if there is no such action.
func ParseAction(s string) (janitorv1.Action, bool) {
	n, ok := parse(janitorv1.Action(0), "ACTION_", s)
	return janitorv1.Action(n), ok
}

// ParseReason returns the reason of a word, like ParseAction.
func ParseReason(s string) (janitorv1.Reason, bool) {
	n, ok := parse(janitorv1.Reason(0), "REASON_", s)
	return janitorv1.Reason(n), ok
}

// words returns the words of all values of an enum except the unspecified one.
func words(of protoreflect.Enum, prefix string) []string {
	values := of.Descriptor().Values()
	out := make([]string, 0, values.Len())
	for i := 1; i < values.Len(); i++ {
		out = append(out, word(string(values.Get(i).Name()), prefix))
	}
	return out
}

func parse(of protoreflect.Enum, prefix, s string) (protoreflect.EnumNumber, bool) {
	s = strings.NewReplacer("-", "", "_", "").Replace(s)
	i := slices.IndexFunc(words(of, prefix), func(w string) bool { return strings.EqualFold(w, s) })
	if i < 0 {
		return 0, false
	}
	return of.Descriptor().Values().Get(i + 1).Number(), true
}
