package pressure

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"syscall"
	"time"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/load"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// The default limits of a sandbox.
const (
	processes = 1024
	memory    = 512 << 20
	openFiles = 65_536
	logBytes  = 16 << 20
)

// bombSeconds is how long a bomb runs if it is not ended, longer than it is measured.
const bombSeconds = 60

// endTime is how long the agent may take to find that a sandbox has taken too much disk.
const endTime = 40 * time.Second

// bomb is a load that takes more and more of something.
type bomb struct {
	load, does string
	// bounded returns evidence that nothing bounds the bomb.
	bounded func(ctx context.Context, s *mesh.Scene, r *running) (string, error)
	bound   string
	// expected is the issue that keeps the load from neighbors; empty if nothing of it reaches them.
	expected string
}

func bombs() []bomb {
	atMost := func(limit int64, unit string) func(context.Context, *mesh.Scene, *running) (string, error) {
		return func(_ context.Context, _ *mesh.Scene, r *running) (string, error) {
			if n := r.most(); n > limit {
				return fmt.Sprintf("it has %d %s", n, unit), nil
			}
			return "", fmt.Errorf("it has %d %s, of at most %d", r.most(), unit, limit)
		}
	}
	return []bomb{
		{load: load.Spin, does: "computes on 64 threads"},
		{load: load.Fork, does: "starts processes that start processes", bounded: atMost(processes, "processes"), bound: "it has more than 1,024 processes"},
		{load: load.Memory, does: "allocates until it is killed, again and again", bounded: atMost(memory, "bytes"), bound: "it has more than 512 MiB"},
		{load: load.Files, does: "opens files", bounded: atMost(openFiles, "files"), bound: "a process has more than 65,536 files open"},
		{load: load.Log, does: "prints as fast as it can", bounded: logIsBounded, bound: "its log is larger than twice the limit"},
		{load: load.Disk, does: "writes to its file system", bounded: endedForDisk, bound: "it is not ended with the reason DiskLimitExceeded"},
		{load: load.Inodes, does: "makes empty files", bounded: endedForDisk, bound: "it is not ended with the reason DiskLimitExceeded"},
	}
}

// Bombs runs every bomb beside the neighbor.
func Bombs(ctx context.Context, s *mesh.Scene, n *Samples) error {
	for _, b := range bombs() {
		s.Say("bomb: %s", b.load)
		calm, storm, r, err := measure(ctx, s, n, bombSeconds, b.load)
		if err != nil && r == nil {
			return err
		}
		evidence, refused := "", suite.Brokenf("measuring: %w", err)
		if err == nil {
			var ratio float64
			ratio, evidence, refused = Compare(calm, storm)
			s.Log.Figure(b.load+"_neighbor_p90_ratio", ratio)
			s.Log.Figure(b.load+"_neighbor_p50_ratio", storm.P50/max(calm.P50, 1))
			s.Log.Figure(b.load+"_neighbor_p99_ratio", storm.P99/max(calm.P99, 1))
			s.Log.Figure(b.load+"_neighbor_sync_ratio", storm.Sync/max(calm.Sync, 1)) // the disk is not divided: not judged
		}
		s.Log.Made(suite.Attempt{Name: "bombs: neighbor of a " + b.load + " bomb", Does: b.does + " beside a sandbox of another tenant",
			Success: fmt.Sprintf("the work of the neighbor takes more than %.0f times as long", MaxRatio), Expected: b.expected}, "", evidence, refused)
		if b.bounded != nil {
			evidence, refused := b.bounded(ctx, s, r)
			s.Log.Made(suite.Attempt{Name: "bombs: bound of a " + b.load + " bomb", Does: b.does, Success: b.bound}, "", evidence, refused)
		}
		if err := finish(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// logIsBounded measures the log of the bomb on the node.
func logIsBounded(ctx context.Context, s *mesh.Scene, _ *running) (string, error) {
	ids, err := s.Containers(ctx, s.Hostile.Namespace, bombName)
	if err != nil || len(ids) != 1 {
		return "", suite.Brokenf("looking for the bomb: %d containers: %w", len(ids), err)
	}
	total := int64(0)
	err = filepath.WalkDir(filepath.Join(ctrd.DefaultLogRoot, ids[0]), func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			total += st.Blocks * 512
		} else {
			total += info.Size()
		}
		return nil
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", suite.Brokenf("measuring the log: %w", err)
	}
	s.Log.Figure("log_bytes_kept", float64(total))
	switch {
	case total == 0:
		return "", suite.Brokenf("the bomb has no log")
	case total > 2*logBytes:
		return fmt.Sprintf("the log takes %d bytes", total), nil
	}
	return "", fmt.Errorf("the log takes %d bytes", total)
}

// endedForDisk waits until the agent has ended the bomb.
func endedForDisk(ctx context.Context, s *mesh.Scene, r *running) (string, error) {
	err := mesh.Poll(ctx, endTime, func(ctx context.Context) error {
		box, err := s.Hostile.Get(ctx, bombName)
		if err != nil {
			return err
		}
		if st := box.GetStatus(); st.GetPhase() != sandboxv1.Phase_PHASE_FAILED || st.GetReason() != "DiskLimitExceeded" {
			return fmt.Errorf("the sandbox is %s (%s)", st.GetPhase(), st.GetReason())
		}
		return nil
	})
	if err != nil {
		return fmt.Sprintf("it has written %d and was not ended: %v", r.most(), err), nil
	}
	return "", fmt.Errorf("it was ended after about %d", r.most())
}
