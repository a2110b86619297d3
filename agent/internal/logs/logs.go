// Package logs owns the files of sandboxes' output. A sandbox's shim writes the output directly into a file on the host, so
// it needs no process of ours and outlives the agent; this package bounds the file and reads it. It never starts or ends a
// process.
//
//	<root>/<container id>/output.log   stdout and stderr, each in the order of writing; the shim appends (O_APPEND)
//	                     index         (time, offset) pairs at about one for each second in which the file grew
//	                     hostname      the sandbox's /etc/hostname
//	                     started       when the process was started; exists once it was
//	                     owner         uid of the agent's Pod
//	                     limit         bytes of output that are kept, for the janitor, which bounds the file while no agent runs
//
// The file is bounded by freeing its oldest blocks (fallocate, punching a hole): offsets keep their meaning, the writer
// is not affected, and no byte in flight is lost. A reader begins at the first line after the hole.
//
// All methods may be called concurrently.
package logs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

const (
	outputName   = ctrd.OutputFile
	indexName    = "index"
	hostnameName = "hostname"
	startedName  = "started"
	ownerName    = ctrd.OwnerFile
	limitName    = ctrd.LimitFile
	newPrefix    = ctrd.NewLogPrefix
)

// DefaultMaxBytes is the default bound of one sandbox's output.
const DefaultMaxBytes = 16 << 20

// Config is what a Store needs.
type Config struct {
	// Root is the directory, at the same path on the host and here.
	Root string
	// Owner is the uid of the agent's Pod: other agents on the node keep their logs in the same directory.
	Owner string
	// MaxBytes bounds what is kept of one sandbox's output. Zero: DefaultMaxBytes.
	MaxBytes int64
	// Clock; nil is the real one.
	Clock clock.WithTicker
}

// Store keeps the logs of one agent's sandboxes. Make it with New; Run must run for the bound to hold.
type Store struct {
	config  Config
	watcher *watcher

	mu    sync.Mutex
	files map[string]*keeper
}

// New returns a Store. It does no I/O.
func New(cfg Config) *Store {
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = DefaultMaxBytes
	}
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	return &Store{config: cfg, watcher: newWatcher(), files: map[string]*keeper{}}
}

// Paths are the files of a sandbox that its container needs.
type Paths struct{ Output, Hostname string }

// Create creates the directory of a sandbox, completely or not at all. AlreadyExists: another owner has one.
func (s *Store) Create(id, hostname string) (Paths, error) {
	dir, err := s.dir(id)
	if err != nil {
		return Paths{}, err
	}
	if err := os.MkdirAll(s.config.Root, 0o700); err != nil {
		return Paths{}, fmt.Errorf("creating the log root: %w", err)
	}
	tmp := filepath.Join(s.config.Root, newPrefix+s.config.Owner+"-"+id)
	if err := s.fill(tmp, hostname); err != nil {
		return Paths{}, errors.Join(fmt.Errorf("creating the log of %s: %w", id, err), os.RemoveAll(tmp))
	}
	err = os.Rename(tmp, dir)
	if errors.Is(err, fs.ErrExist) && s.owns(dir) {
		// Left by an earlier attempt of ours: no two running containers have one id.
		err = errors.Join(os.RemoveAll(dir), os.Rename(tmp, dir))
	}
	if err != nil {
		err = errors.Join(err, os.RemoveAll(tmp))
		if errors.Is(err, fs.ErrExist) {
			err = errors.Join(errdefs.ErrAlreadyExists, err)
		}
		return Paths{}, fmt.Errorf("creating the log of %s: %w", id, err)
	}
	s.Adopt(id)
	return paths(dir), nil
}

// Paths returns the files of a sandbox whose directory exists.
func (s *Store) Paths(id string) (Paths, error) {
	dir, err := s.dir(id)
	if err != nil {
		return Paths{}, err
	}
	return paths(dir), nil
}

func paths(dir string) Paths {
	return Paths{Output: filepath.Join(dir, outputName), Hostname: filepath.Join(dir, hostnameName)}
}

func (s *Store) owns(dir string) bool {
	owner, err := os.ReadFile(filepath.Join(dir, ownerName))
	return err == nil && string(owner) == s.config.Owner
}

func (s *Store) fill(dir, hostname string) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	for _, f := range []struct {
		name, content string
		mode          fs.FileMode
	}{
		{outputName, "", 0o600}, {ownerName, s.config.Owner, 0o600}, {hostnameName, hostname + "\n", 0o644},
		{limitName, strconv.FormatInt(s.config.MaxBytes, 10), 0o600},
	} {
		if err := os.WriteFile(filepath.Join(dir, f.name), []byte(f.content), f.mode); err != nil {
			return err
		}
	}
	return nil
}

// Adopt begins to keep the log of a sandbox that an earlier agent process created.
func (s *Store) Adopt(id string) {
	dir, err := s.dir(id)
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.files[id]; !ok {
		s.files[id] = &keeper{dir: dir, max: s.config.MaxBytes}
	}
}

// Release ends the keeping of a log. Once it has returned, the Store creates no file in the log's directory, so that another
// component can remove it. It waits for a check of the log that runs. Readers continue.
func (s *Store) Release(id string) {
	s.mu.Lock()
	k := s.files[id]
	delete(s.files, id)
	s.mu.Unlock()
	if k != nil {
		k.release()
	}
}

// Remove ends the keeping of a log and removes its directory. Safe to repeat.
func (s *Store) Remove(id string) error {
	dir, err := s.dir(id)
	if err != nil {
		return err
	}
	s.Release(id)
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("removing the log of %s: %w", id, err)
	}
	return nil
}

// MarkStarted records, beside the log, when the process was started.
func (s *Store) MarkStarted(id string, at time.Time) error {
	dir, err := s.dir(id)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, startedName), []byte(at.UTC().Format(time.RFC3339Nano)), 0o600); err != nil {
		return fmt.Errorf("recording the start of %s: %w", id, err)
	}
	return nil
}

// StartedAt returns what MarkStarted recorded; ok is false if it recorded nothing.
func (s *Store) StartedAt(id string) (time.Time, bool) {
	dir, err := s.dir(id)
	if err != nil {
		return time.Time{}, false
	}
	path := filepath.Join(dir, startedName)
	raw, err := os.ReadFile(path)
	if err != nil {
		return time.Time{}, false
	}
	if at, err := time.Parse(time.RFC3339Nano, string(raw)); err == nil {
		return at, true
	}
	// Torn by a crash: its existence is what counts.
	if info, err := os.Stat(path); err == nil {
		return info.ModTime(), true
	}
	return time.Time{}, false
}

// Sweep removes the directories of this owner whose ids are not in keep, which a crash left. It returns their ids.
func (s *Store) Sweep(keep map[string]bool) ([]string, error) {
	entries, err := os.ReadDir(s.config.Root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the log root: %w", err)
	}
	var swept []string
	var errs []error
	for _, e := range entries {
		id := e.Name()
		half := strings.HasPrefix(id, newPrefix+s.config.Owner+"-")
		if keep[id] || (!half && !s.owns(filepath.Join(s.config.Root, id))) {
			continue
		}
		if err := os.RemoveAll(filepath.Join(s.config.Root, id)); err != nil {
			errs = append(errs, err)
			continue
		}
		swept = append(swept, id)
	}
	return swept, errors.Join(errs...)
}

// Run bounds and indexes all logs until ctx ends.
func (s *Store) Run(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx)
	for {
		s.Keep(log)
		next := s.config.Clock.NewTimer(keepInterval)
		for waiting := true; waiting; {
			growing := s.keepers((*keeper).growing)
			var soon <-chan time.Time
			if len(growing) > 0 {
				soon = s.config.Clock.After(growingInterval)
			}
			select {
			case <-ctx.Done():
				next.Stop()
				return nil
			case <-soon:
				s.keep(log, growing)
			case <-next.C():
				waiting = false
			}
		}
	}
}

// Keep checks every log once, as Run does several times a second.
func (s *Store) Keep(log logr.Logger) {
	all := s.keepers(func(*keeper) bool { return true })
	s.keep(log, all)
	for _, f := range all {
		f.measure()
	}
}

func (s *Store) keep(log logr.Logger, files map[string]*keeper) {
	for id, f := range files {
		if err := f.keep(s.config.Clock.Now); err != nil && !errors.Is(err, fs.ErrNotExist) {
			log.V(2).Info("keeping log failed", obs.KeyContainer, id, obs.KeyError, err.Error())
		}
	}
}

// keepers returns the logs to check, by the id of their containers.
func (s *Store) keepers(which func(*keeper) bool) map[string]*keeper {
	s.mu.Lock()
	all := maps.Clone(s.files)
	s.mu.Unlock()
	maps.DeleteFunc(all, func(_ string, f *keeper) bool { return !which(f) })
	return all
}

func (s *Store) dir(id string) (string, error) {
	if id == "" || strings.HasPrefix(id, ".") || strings.ContainsAny(id, "/\x00") {
		return "", fmt.Errorf("container id %q: %w", id, errdefs.ErrInvalidArgument)
	}
	return filepath.Join(s.config.Root, id), nil
}
