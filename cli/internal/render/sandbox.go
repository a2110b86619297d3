package render

import (
	"fmt"
	"strings"
	"time"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// Columns selects optional columns of a table.
type Columns struct{ Event, Namespace, Wide bool }

// Sandboxes returns an empty table of sandboxes.
func Sandboxes(c Columns) *Table {
	var header []string
	if c.Event {
		header = append(header, "EVENT")
	}
	if c.Namespace {
		header = append(header, "NAMESPACE")
	}
	header = append(header, "NAME", "PHASE", "POOL", "AGENT", "EXIT", "AGE")
	if c.Wide {
		header = append(header, "NODE", "IMAGE", "ENDPOINTS", "START", "UID")
	}
	return NewTable(header...)
}

// Row returns the row of a sandbox in a table of the same columns.
func Row(c Columns, event string, s *sandboxv1.Sandbox, now time.Time) []string {
	var row []string
	if c.Event {
		row = append(row, event)
	}
	if c.Namespace {
		row = append(row, s.GetNamespace())
	}
	st := s.GetStatus()
	row = append(row, s.GetName(), PhaseWord(s), s.GetSpec().GetPool(), st.GetAssignedPod(), Exit(st), Age(s.GetCreateTime().AsTime(), now))
	if c.Wide {
		row = append(row, st.GetNodeName(), s.GetSpec().GetImage(), strings.Join(st.GetEndpoints(), ","), StartPath(st.GetStartPath()), s.GetUid())
	}
	return row
}

// Started returns one line about a create: its duration for the caller, the start path, and the time of each stage. `outside` is
// the time outside of all stages, which is mostly that of the connection. A repeated answer has no stages, because they are
// those of the first call.
func Started(out *sandboxv1.CreateSandboxResponse, took time.Duration) string {
	line := "started in " + Millis(took) + " ms"
	if out.GetReplayed() {
		line = "answered in " + Millis(took) + " ms"
	}
	if path := StartPath(out.GetStartPath()); path != "" {
		line += " (" + strings.ToLower(path) + ")"
	}
	var parts []string
	rest := took
	for _, t := range out.GetTimings() {
		d := t.GetDuration().AsDuration()
		parts = append(parts, t.GetStage()+" "+Millis(d))
		rest -= d
	}
	if len(parts) == 0 || out.GetReplayed() {
		return line
	}
	if rest > 0 {
		parts = append(parts, "outside "+Millis(rest))
	}
	return line + ": " + strings.Join(parts, ", ")
}

// StartPath returns a start path as a word: Slot or Cold; empty if it is not known.
func StartPath(p sandboxv1.StartPath) string { return word(p.String(), "START_PATH_") }

// Exit returns the exit code; empty if there is none.
func Exit(st *sandboxv1.SandboxStatus) string {
	if st == nil || st.ExitCode == nil {
		return ""
	}
	return fmt.Sprint(st.GetExitCode())
}

// Phase returns a phase as Kubernetes shows it: Running.
func Phase(p sandboxv1.Phase) string { return word(p.String(), "PHASE_") }

// PhaseWord returns the phase of a sandbox with its reason: Failed (OOMKilled).
func PhaseWord(s *sandboxv1.Sandbox) string {
	st := s.GetStatus()
	w := Phase(st.GetPhase())
	for _, c := range st.GetConditions() {
		if c.GetType() == "AgentLost" && c.GetStatus() == "True" {
			return w + " (AgentLost)"
		}
	}
	if st.GetPhase() == sandboxv1.Phase_PHASE_FAILED && st.GetReason() != "" {
		return w + " (" + st.GetReason() + ")"
	}
	return w
}

// word converts PREFIX_AUTO_RECREATE to AutoRecreate, and the unspecified value to "".
func word(name, prefix string) string {
	name = strings.TrimPrefix(name, prefix)
	if name == "UNSPECIFIED" {
		return ""
	}
	var b strings.Builder
	for part := range strings.SplitSeq(name, "_") {
		if part != "" {
			b.WriteString(part[:1] + strings.ToLower(part[1:]))
		}
	}
	return b.String()
}

// ParsePhase returns the phase of a word, in any case; false if there is no such phase.
func ParsePhase(s string) (sandboxv1.Phase, bool) {
	v, ok := sandboxv1.Phase_value["PHASE_"+strings.ToUpper(s)]
	return sandboxv1.Phase(v), ok && v != 0
}

// Phases returns the words of all phases.
func Phases() []string {
	var out []string
	for n := int32(1); ; n++ {
		name, ok := sandboxv1.Phase_name[n]
		if !ok {
			return out
		}
		out = append(out, word(name, "PHASE_"))
	}
}
