package audit

import (
	"slices"
	"time"
)

// expectation is what the log implies for the state of a life.
type expectation int

const (
	expectAbsent expectation = iota
	expectPresent
	// expectUnknown: a call had no answer, so both are right.
	expectUnknown
)

// life is one sandbox that a client requested, as the log records it.
type life struct {
	index     int
	name      string
	requestID string
	calls     []Call
	uids      []string // of the acknowledged creates, each once
	agent     string   // Pod of the agent that the create's answer named
	want      expectation
	spec      Spec
	label     string
	reset     time.Time
}

// livesOf reads the log. Calls of one life are in the order in which they were sent.
func livesOf(calls []Call) []*life {
	byIndex := map[int]*life{}
	var lives []*life
	for _, c := range calls {
		l := byIndex[c.Life]
		if l == nil {
			l = &life{index: c.Life, name: c.Name, requestID: c.RequestID}
			byIndex[c.Life] = l
			lives = append(lives, l)
		}
		l.calls = append(l.calls, c)
	}
	for _, l := range lives {
		slices.SortStableFunc(l.calls, func(a, b Call) int { return a.Sent.Compare(b.Sent) })
		l.read()
	}
	slices.SortFunc(lives, func(a, b *life) int { return a.index - b.index })
	return lives
}

// read derives what the answers promise.
func (l *life) read() {
	unsure, deleted := false, false
	for _, c := range l.calls {
		switch {
		case c.Op == Create:
			l.spec = c.Spec
			if c.Outcome == Acked && !slices.Contains(l.uids, c.UID) {
				l.uids, l.agent = append(l.uids, c.UID), c.Agent
			}
			unsure = unsure || c.Outcome == Unknown
		case c.Outcome == Unknown:
			unsure = true
		case c.Op == Delete:
			// A delete that ended before the create's answer may have found nothing.
			deleted = deleted || !l.overtook(c)
		case c.Op == Update && c.Outcome == Acked:
			l.change(c.Change)
		}
	}
	switch {
	case deleted: // it resolves a create without an answer
		l.want = expectAbsent
	case unsure:
		l.want = expectUnknown
	case len(l.uids) > 0:
		l.want = expectPresent
	default:
		l.want = expectAbsent
	}
}

// overtook reports whether the delete found nothing while a create was still being executed.
func (l *life) overtook(del Call) bool {
	if del.Outcome == Acked && !del.Unsure {
		return false
	}
	return slices.ContainsFunc(l.calls, func(c Call) bool { return c.Op == Create && c.Answered.After(del.Sent) })
}

// recreates reports whether the failure policy was AutoRecreate all the time.
func (l *life) recreates() bool {
	return l.spec.AutoRecreate && !slices.ContainsFunc(l.calls, func(c Call) bool { return c.Change.AutoRecreate != nil })
}

func (l *life) change(c Change) {
	if c.Label != nil {
		l.label = *c.Label
	}
	if c.ExpireTime != nil {
		l.spec.ExpireTime = *c.ExpireTime
	}
	if c.AutoRecreate != nil {
		l.spec.AutoRecreate = *c.AutoRecreate
	}
	if c.Reset != nil {
		l.reset = *c.Reset
	}
}

// denials returns answers that say that an acknowledged sandbox does not exist, before any client deleted it.
func (l *life) denials() []Call {
	if len(l.uids) == 0 {
		return nil
	}
	var out []Call
	deleted := false
	for _, c := range l.calls {
		if c.Op != Create && c.Outcome == Refused && !deleted && !l.overtook(c) &&
			(c.Reason == reasonNotFound || c.Reason == reasonFenceMismatch) {
			out = append(out, c)
		}
		deleted = deleted || c.Op == Delete && c.Outcome != Refused
	}
	return out
}
