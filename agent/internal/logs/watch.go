package logs

import (
	"sync"

	"github.com/fsnotify/fsnotify"
)

// watcher wakes the followers of logs. One inotify instance serves all of them: the kernel allows a user few (128 by default), and
// root shares its own with the whole node.
//
// The instance, and the goroutine that reads it, exist while there is a follower. All methods may be called concurrently.
type watcher struct {
	open func() (*fsnotify.Watcher, error)

	turn   sync.Mutex        // orders changes of the instance; taken before mu, and never by the goroutine
	notify *fsnotify.Watcher // nil without followers, and while the kernel gives no instance
	done   chan struct{}     // closed when the goroutine has ended

	mu        sync.Mutex
	followers map[string]map[chan struct{}]struct{}
}

func newWatcher() *watcher {
	return &watcher{open: fsnotify.NewWatcher, followers: map[string]map[chan struct{}]struct{}{}}
}

// follow returns a channel that receives after each change of a file, until stop is called. Several changes may be received as
// one. None is received while the kernel gives no instance or no watch: a follower also looks by itself, now and then.
func (w *watcher) follow(path string) (changed <-chan struct{}, stop func()) {
	wake := make(chan struct{}, 1)
	w.turn.Lock()
	defer w.turn.Unlock()
	w.add(path, wake)
	if w.notify == nil {
		w.start()
	}
	if w.notify != nil {
		_ = w.notify.Add(path) // also if it is watched: it may be another file by now
	}
	return wake, func() { w.leave(path, wake) }
}

// start opens the instance. turn is held.
func (w *watcher) start() {
	notify, err := w.open()
	if err != nil {
		return
	}
	done := make(chan struct{})
	w.notify, w.done = notify, done
	go func() {
		defer close(done)
		w.run(notify)
	}()
}

// run passes events on until the instance is closed.
func (w *watcher) run(notify *fsnotify.Watcher) {
	for {
		select {
		case event, ok := <-notify.Events:
			if !ok {
				return
			}
			w.wake(event.Name)
		case _, ok := <-notify.Errors: // events were lost: of which files is unknown
			if !ok {
				return
			}
			w.wakeAll()
		}
	}
}

// leave ends the watch of a file with its last follower, and closes the instance with the last of all.
func (w *watcher) leave(path string, wake chan struct{}) {
	w.turn.Lock()
	defer w.turn.Unlock()
	lastOfFile, last := w.remove(path, wake)
	switch {
	case w.notify == nil:
	case last:
		_ = w.notify.Close()
		<-w.done
		w.notify = nil
	case lastOfFile:
		_ = w.notify.Remove(path) // fails if the file was removed
	}
}

func (w *watcher) add(path string, wake chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.followers[path] == nil {
		w.followers[path] = map[chan struct{}]struct{}{}
	}
	w.followers[path][wake] = struct{}{}
}

func (w *watcher) remove(path string, wake chan struct{}) (lastOfFile, last bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.followers[path], wake)
	lastOfFile = len(w.followers[path]) == 0
	if lastOfFile {
		delete(w.followers, path)
	}
	return lastOfFile, len(w.followers) == 0
}

func (w *watcher) wake(path string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for follower := range w.followers[path] {
		signal(follower)
	}
}

func (w *watcher) wakeAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, ofFile := range w.followers {
		for follower := range ofFile {
			signal(follower)
		}
	}
}

func signal(follower chan struct{}) {
	select {
	case follower <- struct{}{}:
	default: // it has not looked since the last signal
	}
}
