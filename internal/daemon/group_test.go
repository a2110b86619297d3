package daemon_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
)

func TestDependenciesStopAfterSiblings(t *testing.T) {
	var order []string // not synchronized: the group orders the writes
	g := daemon.NewGroup()
	g.After("store", func(ctx context.Context) error {
		<-ctx.Done()
		order = append(order, "store")
		return nil
	})
	g.Go("server", func(ctx context.Context) error {
		<-ctx.Done()
		order = append(order, "server")
		return ctx.Err()
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, g.Run(ctx))
	require.Equal(t, []string{"server", "store"}, order)
}

func TestFailureOfOnePartStopsAll(t *testing.T) {
	broken := errors.New("broken")
	for name, add := range map[string]func(*daemon.Group){
		"sibling":    func(g *daemon.Group) { g.Go("bad", func(context.Context) error { return broken }) },
		"dependency": func(g *daemon.Group) { g.After("bad", func(context.Context) error { return broken }) },
	} {
		t.Run(name, func(t *testing.T) {
			g := daemon.NewGroup()
			g.Go("good", func(ctx context.Context) error { <-ctx.Done(); return nil })
			add(g)
			err := g.Run(t.Context())
			require.ErrorIs(t, err, broken)
			require.ErrorContains(t, err, "bad")
		})
	}
}

func TestGroupStopsWhenASiblingReturns(t *testing.T) {
	g := daemon.NewGroup()
	g.Go("short", func(context.Context) error { return nil })
	g.Go("long", func(ctx context.Context) error { <-ctx.Done(); return nil })
	require.NoError(t, g.Run(t.Context()))
}
