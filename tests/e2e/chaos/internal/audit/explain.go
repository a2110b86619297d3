package audit

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
)

// codeOf prints an exit code that may be missing.
func codeOf(code *int32) string {
	if code == nil {
		return "nothing"
	}
	return fmt.Sprint(*code)
}

// Explain returns the history of each life with a violation: the clients' log, the faults of that time, and the observed
// state.
func Explain(v Verdict, calls []Call, strikes []Strike, obs Observations) string {
	var b strings.Builder
	a := &auditor{obs: obs, lives: livesOf(calls)}
	a.sort()
	described := map[int]bool{}
	for _, x := range v.Violations {
		fmt.Fprintf(&b, "VIOLATION %s: life %d, %s: %s\n", x.Kind, x.Life, x.Subject, x.What)
	}
	for _, x := range v.Violations {
		if described[x.Life] {
			continue
		}
		described[x.Life] = true
		fmt.Fprintf(&b, "\n=== life %d (%s)\n", x.Life, x.Subject)
		if n := slices.IndexFunc(a.lives, func(l *life) bool { return l.index == x.Life }); n >= 0 {
			a.history(&b, a.lives[n], strikes)
		}
		a.dumps(&b, x.Life)
	}
	return b.String()
}

// history merges the life's calls and the faults of its time.
func (a *auditor) history(b *strings.Builder, l *life, strikes []Strike) {
	type line struct {
		at   time.Time
		text string
	}
	var lines []line
	begin, end := l.calls[0].Sent.Add(-15*time.Second), l.calls[0].Sent
	for _, c := range l.calls {
		raw, _ := json.Marshal(c)
		lines = append(lines, line{c.Sent, fmt.Sprintf("%s after %s: %s", c.Op, c.Answered.Sub(c.Sent).Round(time.Millisecond), raw)})
		end = c.Answered
	}
	for _, s := range strikes {
		if s.At.After(begin) && (l.want == expectPresent || s.At.Before(end.Add(5*time.Second))) {
			lines = append(lines, line{s.At, strings.TrimSpace(fmt.Sprintf("FAULT %s %s for %s %s", s.Kind, s.Target, s.Lasted.Round(time.Millisecond), s.Failed))})
		}
	}
	slices.SortStableFunc(lines, func(x, y line) int { return x.at.Compare(y.at) })
	for _, x := range lines {
		fmt.Fprintf(b, "%s %s\n", x.at.UTC().Format("15:04:05.000"), x.text)
	}
}

func (a *auditor) dumps(b *strings.Builder, n int) {
	for _, r := range a.resources[n] {
		fmt.Fprintf(b, "--- custom resource %s\n%s\n", r.Name, r.Dump)
	}
	for _, r := range a.reports[n] {
		fmt.Fprintf(b, "--- report of agent %s\n%s\n", r.AgentUID, r.Dump)
	}
	for _, c := range a.containers[n] {
		fmt.Fprintf(b, "--- container %s running=%t agent=%s\n%s\n", c.ID, c.Running, c.AgentUID, c.Dump)
	}
	for _, r := range a.remnants[n] {
		fmt.Fprintf(b, "--- %s %s\n", r.Kind, r.ID)
	}
	for _, t := range a.tombstones[n] {
		fmt.Fprintf(b, "--- tombstone of %s on agent %s\n", t.UID, t.AgentUID)
	}
}
