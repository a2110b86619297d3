package sandbox

import (
	"context"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/launch"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// View shows the sandboxes of a Manager whose processes were started. It changes nothing. All methods may be called concurrently.
type View struct{ manager *Manager }

// NewView returns a View of a Manager.
func NewView(m *Manager) View { return View{m} }

// Started is a sandbox whose process was started.
type Started struct {
	// ID is that of its container.
	ID string
	// Record is what was asked for, Report what is known of it. Neither may be modified.
	Record *agentv1.SandboxRecord
	Report *agentv1.SandboxReport
	// Ended is closed once the process has ended.
	Ended <-chan struct{}
}

// StartTime returns when the process was started.
func (s Started) StartTime() *timestamppb.Timestamp { return s.Report.GetStartTime() }

// OwnNetwork reports whether the sandbox has a network of its own.
func (s Started) OwnNetwork() bool { return launch.Network(s.Record) != runtime.NetworkAgent }

// Running returns the sandboxes whose processes run and that are not being deleted.
func (v View) Running() []Started {
	v.manager.mu.Lock()
	defer v.manager.mu.Unlock()
	var out []Started
	for _, e := range v.manager.sandboxes {
		if e.runs() {
			out = append(out, e.started())
		}
	}
	return out
}

// Find returns the sandbox that a fence names. It waits for a create that runs.
func (v View) Find(ctx context.Context, fence *agentv1.Fence) (Started, error) {
	e, err := v.manager.findCreated(ctx, fence)
	if err != nil {
		return Started{}, err
	}
	v.manager.mu.Lock()
	defer v.manager.mu.Unlock()
	return e.started(), nil
}

// started returns what a View shows. mu is held.
func (e *entry) started() Started {
	return Started{ID: e.id, Record: e.record, Report: e.report, Ended: e.ended}
}
