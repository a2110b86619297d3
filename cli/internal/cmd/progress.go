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

// progress shows, on a terminal, what is being done once it takes more than a second, on one line that it takes back.
// Where no terminal is it does nothing. start and stop are called by one goroutine.
type progress struct {
	w     io.Writer
	clock clock.WithTicker
	on    bool

	quit chan struct{}
	done chan struct{}

	mu    sync.Mutex // also keeps the line whole on the terminal
	text  string
	shown bool
}

// start begins to show text, or changes it.
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

// stop takes the line back.
func (p *progress) stop() {
	if p.quit == nil {
		return
	}
	close(p.quit)
	<-p.done
	p.quit = nil
	p.pause()
}

// pause takes the line back until it is drawn anew, so that another line can be written.
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
	ticker := p.clock.NewTicker(progressEvery)
	defer ticker.Stop()
	for {
		select {
		case <-quit:
			return
		case now := <-ticker.C():
			if now.Sub(begin) < progressAfter {
				continue
			}
			p.mu.Lock()
			fmt.Fprintf(p.w, "\r\x1b[K%s ... %ds", p.text, int(now.Sub(begin).Seconds()))
			p.shown = true
			p.mu.Unlock()
		}
	}
}
