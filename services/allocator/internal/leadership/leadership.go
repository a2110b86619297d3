// Package leadership reports whether this allocator leads, and the address of the replica that does. It is a view of an
// elector, or of none: an allocator that runs alone always leads. Only Confirm does I/O. All methods may be called
// concurrently.
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

// State is the state of leadership.
type State struct {
	// Leads is set while this process leads, as far as it knows. It is not set once a higher term is known.
	Leads bool
	// Term of this process's leadership; 0 if it does not lead or runs alone.
	Term int64
	// Address of the replica that leads, and Holder, its identity in the Lease; empty if it is not known, or is this process.
	Address, Holder string
}

// View is the view of an elector.
type View struct {
	elector  Elector
	identity string
}

// Alone returns the view of a process that always leads, without a term.
func Alone() *View { return &View{} }

// New returns the view of an elector that takes part under an identity.
func New(e Elector, identity Identity) *View { return &View{elector: e, identity: identity.String()} }

// State returns the current state, and a channel that is closed when it may have changed; nil if it never changes.
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
	if err != nil { // the Lease of another program: no address is known
		return State{}, changed
	}
	return State{Address: holder.Address, Holder: s.Holder}, changed
}

// Leads reports whether this process leads.
func (l *View) Leads() bool {
	s, _ := l.State()
	return s.Leads
}

// Confirm reports whether this process certainly leads, so that no other process has led until now. It may ask the API
// server.
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
