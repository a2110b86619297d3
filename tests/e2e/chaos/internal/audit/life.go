package audit

import (
	"slices"
	"time"
)

// wish is what the log says should be there of a life.
type wish int

const (
	nothing wish = iota
	something
	// anything: a call was never answered, so that nobody can tell.
	anything
)

// life is one sandbox that a client asked for, as the log tells it.
type life struct {
	index     int
	name      string
	requestID string
	calls     []Call
	uids      []string // of the acknowledged creates, each once
	agent     string   // Pod of the agent that the create's answer named
	want      wish
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

// read works out what the answers promise.
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
			// A delete that ended before the create's answer came may have met nothing.
			deleted = deleted || !l.overtook(c)
		case c.Op == Update && c.Outcome == Acked:
			l.change(c.Change)
		}
	}
	switch {
	case deleted: // it settles what an unanswered create has left open
		l.want = nothing
	case unsure:
		l.want = anything
	case len(l.uids) > 0:
		l.want = something
	default:
		l.want = nothing
	}
}

// overtook tells that the delete found nothing while a create was still being carried out.
func (l *life) overtook(del Call) bool {
	if del.Outcome == Acked && !del.Unsure {
		return false
	}
	return slices.ContainsFunc(l.calls, func(c Call) bool { return c.Op == Create && c.Answered.After(del.Sent) })
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

// denials are answers that say that an acknowledged sandbox does not exist, before anybody deleted it.
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
