package cmd

import (
	"fmt"
	"io"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

const (
	progressAfter = time.Second
	progressEvery = 200 * time.Millisecond
)

// progress shows on a terminal what a call does if it takes more than a second, on one line that is erased afterwards. Without
// a terminal it does nothing. start and stop are called by one goroutine.
type progress struct {
	w     io.Writer
	clock clock.WithTicker
	on    bool
	// lines prints a line each second, for an output that is not a terminal.
	lines bool

	quit chan struct{}
	done chan struct{}

	mu    sync.Mutex // also held while the line is written
	text  string
	live  func() string // replaces text if it is set
	shown bool
}

// start shows text, in place of the text before.
func (p *progress) start(text string) {
	if !p.on || text == "" {
		return
	}
	p.mu.Lock()
	p.text = text
	p.mu.Unlock()
	if p.quit != nil {
		return
	}
	p.quit, p.done = make(chan struct{}), make(chan struct{})
	go p.run(p.quit, p.done, p.clock.Now())
}

// show is start for a text that changes.
func (p *progress) show(live func() string) {
	p.mu.Lock()
	p.live = live
	p.mu.Unlock()
	p.start(" ")
}

// stop erases the line and ends the progress.
func (p *progress) stop() {
	if p.quit == nil {
		return
	}
	close(p.quit)
	<-p.done
	p.quit, p.live = nil, nil
	p.pause()
}

// pause erases the line until the next tick, so that another line can be written.
func (p *progress) pause() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shown {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.shown = false
	}
}

func (p *progress) run(quit <-chan struct{}, done chan<- struct{}, begin time.Time) {
	defer close(done)
	every := progressEvery
	if p.lines {
		every = progressAfter
	}
	ticker := p.clock.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-quit:
			return
		case now := <-ticker.C():
			if now.Sub(begin) < progressAfter {
				continue
			}
			p.print(int(now.Sub(begin).Seconds()))
		}
	}
}

func (p *progress) print(seconds int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	text := p.text
	if p.live != nil {
		text = p.live()
	}
	if p.lines {
		fmt.Fprintf(p.w, "%s ... %ds\n", text, seconds)
		return
	}
	fmt.Fprintf(p.w, "\r\x1b[K%s ... %ds", text, seconds)
	p.shown = true
}
