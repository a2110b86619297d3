// Package terms is the agent's fence against leaders that were deposed and do not know it: it keeps, durably, the highest
// term of each kind of leader (the role in the caller's certificate; "" for all callers of a server without TLS) and
// refuses calls that carry a lower one. proto/fastsandbox/agent/v1/agent_service.proto has the contract.
//
// A call that was let in under a term may be under way still when the next term comes. For calls that change sandboxes,
// raised says so to the one who orders them (sandbox.Manager.Supersede), before the call that brought the new term goes on:
// whoever has an answer under the new term knows that nothing of a lower one begins any more.
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
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// file is where the terms are kept: a JSON object of role and term.
const file = "terms"

// Store keeps files durably; state.Dir is one.
type Store interface {
	// Read returns a file; nil without an error if there is none.
	Read(name string) ([]byte, error)
	// Write makes or replaces a file; once it has returned, the file is durable.
	Write(name string, data []byte) error
}

// Fence keeps the highest terms. Make it with Open.
type Fence struct {
	store  Store
	raised func(role string, term int64)

	// raising is held while a term grows, the writing included; mu never over I/O. raising comes before mu.
	raising sync.Mutex
	mu      sync.Mutex
	highest map[string]int64
}

// Open reads the terms that are known. raised is told of each of them, and then of each that grows, before any call under
// it goes on; it must not call the Fence. A file that cannot be read is an error: to begin anew would let the deposed in.
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

// Guard is rpc.ServerConfig's Guard: it refuses a call whose term is lower than the highest that is known, or that has none
// although one is known (FailedPrecondition/LeaderSuperseded, with that term), and one whose higher term cannot be made
// durable (Unavailable/AgentUnavailable). Watching and reading logs change nothing and pass.
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

// Caller is who makes a call: a leader in one of its terms.
type Caller struct {
	// Role is the kind of leader; empty without TLS.
	Role string
	// Term is the term of the call; 0 if it carries none.
	Term int64
}

// CallerOf is the caller of a call, by its context. Outside of a call it is the zero Caller. An error names the metadata.
func CallerOf(ctx context.Context) (Caller, error) {
	term, err := rpc.TermOf(ctx)
	if err != nil {
		return Caller{}, err
	}
	return Caller{Role: string(rpc.PeerRole(ctx)), Term: term}, nil
}

// Superseded is the error of a call whose term is no longer the highest of its kind.
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

// raise makes a higher term known, once for all calls that bring it.
func (f *Fence) raise(ctx context.Context, c Caller) error {
	f.raising.Lock()
	defer f.raising.Unlock()
	f.mu.Lock()
	next := maps.Clone(f.highest)
	f.mu.Unlock()
	known := next[c.Role]
	if c.Term <= known { // another call was faster
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
	logr.FromContextOrDiscard(ctx).Info("a leader has a new term", "role", c.Role, "term", c.Term, "before", known)
	return nil
}
