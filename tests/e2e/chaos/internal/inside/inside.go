// Package inside uses sandboxes while the mesh has faults: it follows the output of processes, connecting again wherever that breaks, and writes
// and reads files. Whatever fails meanwhile, a process of a sandbox that still runs has to be known, its output complete and in order, and a
// file the last one that was written. Run must be called once.
package inside

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/types/known/durationpb"
	"k8s.io/utils/clock"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// pause is the time between two tries of a call.
	pause = 200 * time.Millisecond
	// callTime bounds one try of a call that is no stream.
	callTime = 15 * time.Second
	// lagTime is how long a status may say that a container runs which has ended.
	lagTime = 20 * time.Second
	// deleteTime is how long the deletion of all sandboxes may take.
	deleteTime = 2 * time.Minute
)

// Config says where and what.
type Config struct {
	Sandboxes sandboxv1.SandboxServiceClient
	Processes processv1.ProcessServiceClient
	Files     filesystemv1.FilesystemServiceClient
	Clock     clock.WithTicker
	// Namespace, Pool and Image of the sandboxes, whose names begin with Prefix.
	Namespace, Pool, Image, Prefix string
	// Users is how many sandboxes are used at once.
	Users int
	// Lines is how many lines a process writes, each after Every.
	Lines int
	Every time.Duration
	// FileBytes is the size of files.
	FileBytes int
}

// Result is what was done, and what was wrong.
type Result struct {
	// Processes have ended and Bytes are their output, which took Connections.
	Processes   int `json:"processes"`
	Bytes       int `json:"bytes"`
	Connections int `json:"connections"`
	// Writes and Reads of files were answered.
	Writes int `json:"file_writes"`
	Reads  int `json:"file_reads"`
	// Replaced are sandboxes that a fault has ended.
	Replaced int `json:"sandboxes_replaced"`
	// Broken are the promises that were not kept.
	Broken []string `json:"broken"`
}

// Run uses sandboxes until ctx ends, and then deletes them.
func Run(ctx context.Context, cfg Config) Result {
	var mu sync.Mutex
	var all Result
	var wg sync.WaitGroup
	for i := range cfg.Users {
		wg.Go(func() {
			u := &user{Config: cfg, name: fmt.Sprintf("%sinside-%d", cfg.Prefix, i)}
			u.run(ctx)
			mu.Lock()
			defer mu.Unlock()
			all.add(u.result)
		})
	}
	wg.Wait()
	return all
}

func (r *Result) add(x Result) {
	r.Processes, r.Bytes, r.Connections = r.Processes+x.Processes, r.Bytes+x.Bytes, r.Connections+x.Connections
	r.Writes, r.Reads, r.Replaced = r.Writes+x.Writes, r.Reads+x.Reads, r.Replaced+x.Replaced
	r.Broken = append(r.Broken, x.Broken...)
}

// user uses one sandbox after the other.
type user struct {
	Config
	name    string
	n       int
	sandbox *sandboxv1.Sandbox
	result  Result
}

func (u *user) run(ctx context.Context) {
	for ctx.Err() == nil {
		if u.sandbox == nil && !u.create(ctx) {
			return
		}
		var files Result
		done := make(chan struct{})
		session, cancel := context.WithCancel(ctx)
		go func() {
			defer close(done)
			files = u.files(session)
		}()
		alive := u.process(ctx)
		cancel()
		<-done
		u.result.add(files)
		if !alive && ctx.Err() == nil {
			u.result.Replaced++
		}
		if !alive || ctx.Err() != nil {
			u.remove(ctx)
		}
	}
	u.remove(ctx)
}

// create creates the next sandbox.
func (u *user) create(ctx context.Context) bool {
	u.n++
	req := &sandboxv1.CreateSandboxRequest{
		Namespace: u.Namespace, Name: fmt.Sprintf("%s-%d", u.name, u.n), RequestId: uuid.NewString(),
		Spec: &sandboxv1.SandboxSpec{Image: u.Image, Pool: u.Pool, KeepAlive: true, TerminationGracePeriod: durationpb.New(0)},
	}
	for ctx.Err() == nil {
		call, cancel := context.WithTimeout(ctx, 4*callTime)
		resp, err := u.Sandboxes.CreateSandbox(call, req)
		cancel()
		if err == nil {
			u.sandbox = resp.GetSandbox()
			return true
		}
		if fault.ReasonOf(rpc.FromStatus(err)) == fault.InvalidField {
			u.broken("a create was refused: %v", err)
			return false
		}
		u.wait(ctx)
	}
	u.sandbox = &sandboxv1.Sandbox{Name: req.GetName()} // that may be there
	return false
}

// remove deletes the sandbox, until that is acknowledged.
func (u *user) remove(ctx context.Context) {
	if u.sandbox == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteTime)
	defer cancel()
	for ctx.Err() == nil {
		call, done := context.WithTimeout(ctx, callTime)
		_, err := u.Sandboxes.DeleteSandbox(call, &sandboxv1.DeleteSandboxRequest{Namespace: u.Namespace, Name: u.sandbox.GetName(), Uid: u.sandbox.GetUid()})
		done()
		if err == nil || fault.ReasonOf(rpc.FromStatus(err)) == fault.SandboxNotFound {
			u.sandbox = nil
			return
		}
		u.wait(ctx)
	}
	u.broken("the deletion of %s was not acknowledged", u.sandbox.GetName())
	u.sandbox = nil
}

// runs reports whether the container that the user knows still runs, as soon as the mesh says.
func (u *user) runs(ctx context.Context) bool {
	for ctx.Err() == nil {
		call, cancel := context.WithTimeout(ctx, callTime)
		resp, err := u.Sandboxes.GetSandbox(call, &sandboxv1.GetSandboxRequest{Namespace: u.Namespace, Name: u.sandbox.GetName()})
		cancel()
		switch reason := fault.ReasonOf(rpc.FromStatus(err)); {
		case err == nil:
			st := resp.GetSandbox().GetStatus()
			return resp.GetSandbox().GetUid() == u.sandbox.GetUid() && st.GetPhase() == sandboxv1.Phase_PHASE_RUNNING &&
				st.GetSandboxId() == u.sandbox.GetStatus().GetSandboxId()
		case reason == fault.SandboxNotFound:
			return false
		}
		u.wait(ctx)
	}
	return true
}

// ends reports whether the status of the sandbox says within lagTime that its container has ended. An agent that says so itself reports it later: half a
// second if something else has killed the container, and longer while faults delay reports.
func (u *user) ends(ctx context.Context) bool {
	for began := u.Clock.Now(); u.Clock.Since(began) < lagTime; u.wait(ctx) {
		if ctx.Err() != nil || !u.runs(ctx) {
			return true
		}
	}
	return false
}

// over reports whether an error says that the sandbox, or something in it, no longer exists.
func over(err error) bool {
	switch fault.ReasonOf(rpc.FromStatus(err)) {
	case fault.SandboxNotFound, fault.ProcessNotFound, fault.FileNotFound, fault.PhaseConflict:
		return true
	}
	return false
}

func (u *user) wait(ctx context.Context) {
	select {
	case <-u.Clock.After(pause):
	case <-ctx.Done():
	}
}

func (u *user) broken(format string, args ...any) {
	u.result.Broken = append(u.result.Broken, fmt.Sprintf(format, args...))
}
