package daemon

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Group runs the parts of a process and ends them in order: when a sibling fails or the context ends, all siblings are
// told to end; once they have returned, the dependencies that they used are. Build it before Run; Run is called once.
type Group struct {
	siblings, dependencies []part
}

type part struct {
	name string
	run  func(context.Context) error
}

// NewGroup returns an empty group.
func NewGroup() *Group { return &Group{} }

// Go adds a sibling. run must return soon after its context has ended; returning before that, with or without an error,
// ends the group.
func (g *Group) Go(name string, run func(context.Context) error) {
	g.siblings = append(g.siblings, part{name, run})
}

// After adds a dependency: it is running while the siblings are, and is told to end only when all of them have returned.
func (g *Group) After(name string, run func(context.Context) error) {
	g.dependencies = append(g.dependencies, part{name, run})
}

// Run runs the group until it has ended and returns all errors; the end of ctx is none.
func (g *Group) Run(ctx context.Context) error {
	siblingCtx, stopSiblings := context.WithCancel(ctx)
	defer stopSiblings()
	dependencyCtx, stopDependencies := context.WithCancel(context.WithoutCancel(ctx))
	defer stopDependencies()

	var mu sync.Mutex
	var errs []error
	start := func(ctx context.Context, parts []part) *sync.WaitGroup {
		var wg sync.WaitGroup
		for _, p := range parts {
			wg.Go(func() {
				err := p.run(ctx)
				if err != nil && (ctx.Err() == nil || !errors.Is(err, context.Canceled)) {
					mu.Lock()
					errs = append(errs, fmt.Errorf("running %s: %w", p.name, err))
					mu.Unlock()
				}
				stopSiblings()
			})
		}
		return &wg
	}
	dependencies := start(dependencyCtx, g.dependencies)
	siblings := start(siblingCtx, g.siblings)
	if len(g.siblings) == 0 {
		<-siblingCtx.Done()
	}
	siblings.Wait()
	stopDependencies()
	dependencies.Wait()
	return errors.Join(errs...)
}
