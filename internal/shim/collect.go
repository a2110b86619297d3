package shim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"
)

// Config of a Collector. All fields are required.
type Config struct {
	// Dir has the versions, as Install knows it.
	Dir string
	// InUse returns which versions records of containers and sandboxes name, or processes execute. It is called while no agent uses any of those
	// that it is asked about.
	InUse func(ctx context.Context, versions []string) (map[string]bool, error)
	// Grace is how long a version must have been unused: containerd completes what a killed agent has asked for.
	Grace time.Duration
	Clock clock.PassiveClock
}

// Collector removes versions that are not in use.
type Collector struct {
	config Config
	unused map[string]unused // by version; only Collect uses it
}

// unused is a version that was found unused.
type unused struct {
	since time.Time
	// held is when an agent last began to use the version.
	held time.Time
}

// NewCollector returns a Collector.
func NewCollector(cfg Config) *Collector { return &Collector{config: cfg, unused: map[string]unused{}} }

// Collect removes the versions that have not been in use for the grace period, as far as this Collector has seen, and returns their names. Only one
// call may run at a time.
func (c *Collector) Collect(ctx context.Context) (removed []string, err error) {
	entries, err := os.ReadDir(c.config.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing the versions of the shim: %w", err)
	}
	locks := map[string]*os.File{}
	defer func() {
		for _, lock := range locks {
			_ = lock.Close()
		}
	}()
	var errs []error
	for _, e := range entries {
		switch name := e.Name(); {
		case strings.HasPrefix(name, oldPrefix): // an earlier removal was interrupted
			errs = append(errs, os.RemoveAll(filepath.Join(c.config.Dir, name)))
		case strings.HasPrefix(name, prefix):
			if lock := c.lock(name); lock != nil {
				locks[name] = lock
			}
		}
	}
	due, err := c.due(ctx, locks)
	if errs = append(errs, err); err != nil {
		return nil, errors.Join(errs...)
	}
	for _, name := range due {
		if err := c.remove(name); err != nil {
			errs = append(errs, fmt.Errorf("removing version %s of the shim: %w", name, err))
			continue
		}
		removed = append(removed, name)
	}
	return removed, errors.Join(errs...)
}

// lock locks a version; nil if an agent uses it, or does not know locks.
func (c *Collector) lock(name string) *os.File {
	lock, err := os.OpenFile(filepath.Join(c.config.Dir, name, lockFile), os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	if flock(lock, unix.LOCK_EX) != nil || !there(lock) {
		_ = lock.Close()
		return nil
	}
	return lock
}

// due returns the locked versions that nothing has used for long enough, in order.
func (c *Collector) due(ctx context.Context, locks map[string]*os.File) ([]string, error) {
	if len(locks) == 0 {
		clear(c.unused)
		return nil, nil
	}
	names := make([]string, 0, len(locks))
	for name := range locks {
		names = append(names, name)
	}
	slices.Sort(names)
	used, err := c.config.InUse(ctx, names)
	if err != nil {
		return nil, fmt.Errorf("finding the versions of the shim that are in use: %w", err)
	}
	now, before := c.config.Clock.Now(), c.unused
	c.unused = map[string]unused{}
	var due []string
	for _, name := range names {
		info, err := locks[name].Stat()
		if err != nil || used[name] {
			continue
		}
		u, known := before[name]
		if !known || !u.held.Equal(info.ModTime()) {
			u = unused{since: now, held: info.ModTime()}
		}
		c.unused[name] = u
		if now.Sub(u.since) >= c.config.Grace {
			due = append(due, name)
		}
	}
	return due, nil
}

// remove deletes a version whose lock this process holds.
func (c *Collector) remove(name string) error {
	old, err := os.MkdirTemp(c.config.Dir, oldPrefix)
	if err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(c.config.Dir, name), filepath.Join(old, name)); err != nil {
		return errors.Join(err, os.Remove(old))
	}
	delete(c.unused, name)
	return os.RemoveAll(old)
}
