//go:build integration

package ctrd_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/usage"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// burning takes a whole processor and 32 MiB, of which dd gives 16 back in the end.
const burning = `i=0; s=x; while [ $i -lt 24 ]; do s=$s$s; i=$((i+1)); done; while :; do :; done`

// TestFigures: what a real sandbox does is in the figures, with each handler, from a slot and without one.
func TestFigures(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	changes := map[string]func(*ctrd.Config){"runc": nil}
	for name, way := range ownWays() {
		changes["fsb, "+name] = way(t, s)
	}
	for name, change := range changes {
		r := newRuntime(t, s, change)
		figures := ctrd.NewFigures(r)
		for _, slot := range []bool{false, true} {
			if slot && change == nil {
				continue
			}
			t.Run(fmt.Sprintf("%s, slot %t", name, slot), func(t *testing.T) {
				b := box(t, s, slot, containerd.Busybox, "sh", "-c", burning)
				b.Limits = resources.Limits{PIDs: 64, MemoryBytes: 128 << 20, CPUMillis: 500}
				b.Network = runtime.NetworkAgent
				if !slot {
					b.Network = runtime.NetworkNone
				}
				require.NoError(t, launch(t.Context(), r, b))
				follow(t, figures, b)
				require.NoError(t, r.Delete(t.Context(), b.ID))
				_, err := figures.Usage(t.Context(), b.ID, true)
				require.ErrorIs(t, err, errdefs.ErrNotFound)
			})
		}
	}
}

// follow checks the figures of a sandbox that burns.
func follow(t *testing.T, figures *ctrd.Figures, b runtime.Container) {
	t.Helper()
	read := func() usage.Usage {
		u, err := figures.Usage(t.Context(), b.ID, b.Network == runtime.NetworkNone)
		require.NoError(t, err)
		return u
	}
	require.Eventually(t, func() bool { return *read().Memory.WorkingSet > 16<<20 }, testkit.Timeout, testkit.Tick, "it has filled its memory")
	first, began := read(), time.Now()
	require.Eventually(t, func() bool { return *read().CPU.Total > *first.CPU.Total+300*time.Millisecond }, testkit.Timeout, testkit.Tick)
	last, took := read(), time.Since(began)
	require.LessOrEqual(t, *last.CPU.Total-*first.CPU.Total, took/2+300*time.Millisecond, "no more than its limit")
	require.Positive(t, *last.CPU.User)
	require.Positive(t, *last.CPU.System)
	require.Greater(t, *last.CPU.Throttled, *first.CPU.Throttled, "it wants more than its limit")
	require.EqualValues(t, 500, *last.CPU.LimitMillis)
	require.GreaterOrEqual(t, *last.Memory.Usage, *last.Memory.WorkingSet)
	require.Less(t, *last.Memory.Usage, int64(128<<20))
	require.GreaterOrEqual(t, *last.Memory.Peak, *last.Memory.Usage)
	require.EqualValues(t, 128<<20, *last.Memory.Limit)
	require.Zero(t, *last.Memory.OOMKills)
	require.Positive(t, *last.PIDs.Current)
	require.EqualValues(t, 64, *last.PIDs.Limit)
	if b.Network == runtime.NetworkNone {
		require.Equal(t, &usage.Network{}, last.Network, "it has only a loopback interface")
	} else {
		require.Nil(t, last.Network, "its traffic is not counted by sandbox")
	}
	// The network of its agent is never taken for its own.
	if u, err := figures.Usage(t.Context(), b.ID, true); b.Network == runtime.NetworkAgent {
		require.NoError(t, err)
		require.Nil(t, u.Network)
	}
}
