// Package leadership tells whether this allocator leads, and where the one that does is reached. It is a view of an elector, or
// of none: an allocator that runs alone always leads. Only Confirm does I/O. All methods may be called concurrently.
package leadership

import (
	"context"

	"github.com/fast-sandbox/fast-sandbox/internal/leader"
)

// Elector is the part of leader.Elector that is used.
type Elector interface {
	State() (leader.State, <-chan struct{})
	Superseded(term int64)
	Confirm(ctx context.Context) (bool, error)
}

// State is who leads.
type State struct {
	// Leads tells that this process does, as far as it knows. A leader that knows of a higher term than its own does not.
	Leads bool
	// Term of this process's lead; 0 if it does not lead or runs alone.
	Term int64
	// Address of the process that leads; empty if none is known, or it is this one.
	Address string
}

// Lead is the view.
type View struct {
	elector  Elector
	identity string
}

// Alone returns the view of a process that always leads, under no term.
func Alone() *View { return &View{} }

// Of returns the view of an elector that takes part under an identity.
func New(e Elector, identity Identity) *View { return &View{elector: e, identity: identity.String()} }

// State is what is known now, and a channel that is closed when that may have changed; nil if it never does.
func (l *View) State() (State, <-chan struct{}) {
	if l.elector == nil {
		return State{Leads: true}, nil
	}
	s, changed := l.elector.State()
	if s.Term > 0 {
		return State{Leads: true, Term: s.Term}, changed
	}
	if s.Holder == "" || s.Holder == l.identity {
		return State{}, changed
	}
	holder, err := ParseIdentity(s.Holder)
	if err != nil { // somebody else's Lease: nobody to turn to
		return State{}, changed
	}
	return State{Address: holder.Address}, changed
}

// Leads tells whether this process leads.
func (l *View) Leads() bool {
	s, _ := l.State()
	return s.Leads
}

// Confirm tells whether this process leads for certain, so that nobody else has until now. It may ask the API server.
func (l *View) Confirm(ctx context.Context) (bool, error) {
	if l.elector == nil {
		return true, nil
	}
	return l.elector.Confirm(ctx)
}

// Term implements rpc.Leader.
func (l *View) Term() int64 {
	s, _ := l.State()
	return s.Term
}

// Superseded implements rpc.Leader.
func (l *View) Superseded(term int64) {
	if l.elector != nil {
		l.elector.Superseded(term)
	}
}
