// Package terms is the agent's fence against leaders that have lost leadership and do not know it. It keeps, durably, the
// highest term of each kind of leader (the role in the caller's certificate; "" for all callers of a server without TLS) and
// refuses calls that carry a lower one. proto/fastsandbox/agent/v1/agent_service.proto has the contract. It never changes a
// sandbox.
//
// A call that was let in under a term may still run when the next term comes. raised reports the new term to the component
// that orders the calls (sandbox.Manager.Supersede) before the call that brought the new term continues: a caller that has an
// answer under the new term knows that no work of a lower term begins afterwards.
//
// All methods may be called concurrently. Nothing is written unless a term grows.
package terms

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"sync"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// file holds the terms, a JSON object of role and term.
const file = "terms"

// Store keeps files durably; state.Dir implements it.
type Store interface {
	// Read returns a file, or nil without an error if there is none.
	Read(name string) ([]byte, error)
	// Write creates or replaces a file. Once it has returned, the file is durable.
	Write(name string, data []byte) error
}

// Fence keeps the highest terms. Make it with Open.
type Fence struct {
	store  Store
	raised func(role string, term int64)

	// raising is held while a term grows, also over the write; mu is never held over I/O. raising comes before mu.
	raising sync.Mutex
	mu      sync.Mutex
	highest map[string]int64
}

// Open reads the terms. It calls raised for each of them, and later for each that grows, before any call under it continues;
// raised must not call the Fence. A file that cannot be read is an error, because ignoring it would let superseded leaders in.
func Open(store Store, raised func(role string, term int64)) (*Fence, error) {
	raw, err := store.Read(file)
	if err != nil {
		return nil, err
	}
	f := &Fence{store: store, raised: raised, highest: map[string]int64{}}
	if raw != nil {
		if err := json.Unmarshal(raw, &f.highest); err != nil {
			return nil, fmt.Errorf("reading the terms of leaders: %w", err)
		}
	}
	for role, term := range f.highest {
		raised(role, term)
	}
	return f, nil
}

// Guard implements the Guard of rpc.ServerConfig. It refuses a call whose term is lower than the highest known one, or that
// has none although one is known (FailedPrecondition/LeaderSuperseded, with the highest term), and a call whose higher term
// cannot be made durable (Unavailable/AgentUnavailable). WatchStatus and StreamLogs change nothing and pass.
func (f *Fence) Guard(ctx context.Context, method string) error {
	switch method {
	case agentv1.AgentService_WatchStatus_FullMethodName, agentv1.AgentService_StreamLogs_FullMethodName:
		return nil
	}
	c, err := CallerOf(ctx)
	if err != nil {
		return err
	}
	known := f.term(c.Role)
	if c.Term > known {
		return f.raise(ctx, c)
	}
	return check(c, known)
}

// Caller identifies the caller of a call: a leader in one of its terms.
type Caller struct {
	// Role is the kind of leader; empty without TLS.
	Role string
	// Term is the term of the call; 0 if it carries none.
	Term int64
}

// CallerOf returns the caller of a call from its context; outside of a call the zero Caller. An error names the metadata.
func CallerOf(ctx context.Context) (Caller, error) {
	term, err := rpc.TermOf(ctx)
	if err != nil {
		return Caller{}, err
	}
	return Caller{Role: string(rpc.PeerRole(ctx)), Term: term}, nil
}

// Superseded returns the error for a call whose term is no longer the highest of its kind.
func Superseded(c Caller, highest int64) error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.LeaderSuperseded,
		"the call is of term %d of role %q, term %d is known", c.Term, c.Role, highest).
		With(rpc.TermMetadata, strconv.FormatInt(highest, 10))
}

func check(c Caller, known int64) error {
	if c.Term < known {
		return Superseded(c, known)
	}
	return nil
}

func (f *Fence) term(role string) int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.highest[role]
}

// raise makes a higher term durable and known, once for all calls that bring it.
func (f *Fence) raise(ctx context.Context, c Caller) error {
	f.raising.Lock()
	defer f.raising.Unlock()
	f.mu.Lock()
	next := maps.Clone(f.highest)
	f.mu.Unlock()
	known := next[c.Role]
	if c.Term <= known { // another call has raised it
		return check(c, known)
	}
	next[c.Role] = c.Term
	raw, err := json.Marshal(next)
	if err != nil {
		return fmt.Errorf("encoding the terms of leaders: %w", err)
	}
	if err := f.store.Write(file, raw); err != nil {
		return fault.Wrap(err, errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent cannot keep the leader's term")
	}
	f.raised(c.Role, c.Term)
	f.mu.Lock()
	f.highest = next
	f.mu.Unlock()
	logr.FromContextOrDiscard(ctx).Info("leader has a new term", obs.KeyRole, c.Role, obs.KeyTerm, c.Term, obs.KeyPreviousTerm, known)
	return nil
}
