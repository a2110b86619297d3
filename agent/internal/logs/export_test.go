package logs

import (
	"errors"

	"github.com/fsnotify/fsnotify"
)

// WithoutNotify makes the kernel refuse inotify instances to a Store.
func (s *Store) WithoutNotify() {
	s.watcher.open = func() (*fsnotify.Watcher, error) { return nil, errors.New("too many open files") }
}
