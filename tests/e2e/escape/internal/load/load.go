// Package load is what a sandbox does for some time: bombs, floods, squatting of ports, and, in the sandbox that suffers, a fixed
// piece of work that is measured. It prints one JSON line for each thing that the harness has to know. Every load ends by
// itself, so that a harness that is killed leaves none behind.
package load

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
)

// Line is a line of the output.
type Line struct {
	// Kind is what it is about: KindBegun, KindSample, KindCount, KindDone, or what the load has achieved.
	Kind string `json:"kind"`
	// At is when, in nanoseconds since the epoch.
	At int64 `json:"at,omitempty"`
	// Micros is the time that a sample of the work has taken, and SyncMicros the time of one that waits for the disk, which few lines have.
	Micros     int64 `json:"us,omitempty"`
	SyncMicros int64 `json:"sync_us,omitempty"`
	// Count is a number of processes, bytes, files, streams or whatever the load is about.
	Count int64 `json:"count,omitempty"`
	// Text is for people.
	Text string `json:"text,omitempty"`
}

// Kinds of lines.
const (
	// Filler is what the lines of the load Log consist of.
	Filler = "x"
	// KindBegun: the load has begun.
	KindBegun = "begun"
	// KindSample: a sample of the neighbor's work.
	KindSample = "sample"
	// KindCount: how far the load has come.
	KindCount = "count"
	// KindDone: the load has ended by itself. KindFailed: it could not be made.
	KindDone, KindFailed = "done", "failed"
	// KindBound: the port of another is bound. KindImpersonated: a client has taken it for the other.
	KindBound, KindImpersonated = "bound", "impersonated"
)

// The loads, which are the first argument of the program. Others follow: the time in seconds, and then what the load needs.
const (
	Neighbor    = "neighbor"
	Roommate    = "roommate"
	Spin        = "cpu"
	Fork        = "fork"
	Memory      = "memory"
	Disk        = "disk"
	Inodes      = "inodes"
	Log         = "log"
	Files       = "files"
	Flood       = "flood"
	Connections = "connections"
	Squat       = "squat"
	Inotify     = "inotify"
	Sleep       = "sleep"
)

// output prints lines. Its methods may be called concurrently.
type output struct {
	mu  sync.Mutex
	enc *json.Encoder
}

func (o *output) line(l Line) {
	o.mu.Lock()
	defer o.mu.Unlock()
	l.At = time.Now().UnixNano()
	_ = o.enc.Encode(l) // it is not read if that fails
}

// Run runs a load: its name, its time in seconds, and its other arguments.
func Run(ctx context.Context, w io.Writer, e *attack.Env, args []string) error {
	if len(args) < 2 {
		return fmt.Errorf("running a load: want a name and a number of seconds, have %q", args)
	}
	seconds, err := strconv.Atoi(args[1])
	if err != nil {
		return fmt.Errorf("running a load: %w", err)
	}
	o := &output{enc: json.NewEncoder(w)}
	run, known := loads()[args[0]]
	if !known {
		return fmt.Errorf("running a load: there is no %q", args[0])
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(seconds)*time.Second)
	defer cancel()
	o.line(Line{Kind: KindBegun, Text: args[0]})
	count, err := run(ctx, o, e, args[2:])
	last := Line{Kind: KindDone, Count: count, Text: args[0]}
	if err != nil {
		last = Line{Kind: KindFailed, Count: count, Text: err.Error()}
	}
	o.line(last)
	return nil
}

// load runs until ctx ends, or earlier, and returns its count.
type load func(ctx context.Context, o *output, e *attack.Env, args []string) (int64, error)

func loads() map[string]load {
	return map[string]load{
		Neighbor: neighbor, Roommate: roommate, Spin: spin, Fork: fork, forkChild: forkForever, Memory: memory, memoryChild: allocate, Disk: disk, Inodes: inodes, Log: log, Files: files,
		Flood: flood, Connections: connections, Squat: squat, Inotify: inotify, Sleep: sleep,
	}
}

func sleep(ctx context.Context, _ *output, _ *attack.Env, _ []string) (int64, error) {
	<-ctx.Done()
	return 0, nil
}

// wait waits, unless ctx ends first.
func wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
