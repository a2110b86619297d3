package daemon

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Group runs the parts of a process and stops them in order. When a part returns or the context ends, the contexts of all
// siblings are canceled. Once the siblings have returned, the contexts of the dependencies that they use are canceled. Add
// all parts before Run. Call Run once.
type Group struct {
	siblings, dependencies []part
}

type part struct {
	name string
	run  func(context.Context) error
}

// NewGroup returns an empty group.
func NewGroup() *Group { return &Group{} }

// Go adds a sibling. run must return soon after its context ends. If it returns earlier, with or without an error, the group
// stops.
func (g *Group) Go(name string, run func(context.Context) error) {
	g.siblings = append(g.siblings, part{name, run})
}

// After adds a dependency. It runs while the siblings run; its context is canceled after all of them have returned.
func (g *Group) After(name string, run func(context.Context) error) {
	g.dependencies = append(g.dependencies, part{name, run})
}

// Run blocks until all parts have returned and returns their errors. The end of ctx is not an error.
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
