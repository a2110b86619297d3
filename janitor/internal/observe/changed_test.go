package observe_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// TestChanged: the channel is closed when a finding changes, and only then. Watches depend on both.
func TestChanged(t *testing.T) {
	scan := func(t *testing.T, w *testEnv) { require.NoError(t, w.Scan(t.Context())) }
	for name, test := range map[string]struct {
		do   func(t *testing.T, w *testEnv)
		want bool
	}{
		"a scan that shows the same":   {scan, false},
		"time":                         {func(t *testing.T, w *testEnv) { w.clock.Step(time.Hour); scan(t, w) }, false},
		"the same Sandbox again":       {func(_ *testing.T, w *testEnv) { w.write(sandbox(uidOne, agentA, 1)) }, false},
		"the same Pod again":           {func(_ *testing.T, w *testEnv) { w.alive(agentA) }, false},
		"a Pod that nothing names":     {func(_ *testing.T, w *testEnv) { w.alive("other"); w.RemovePod("other") }, false},
		"a Sandbox that nothing names": {func(_ *testing.T, w *testEnv) { s := sandbox("v", agentA, 1); s.Name = "two"; w.write(s) }, false},
		"a new container": {func(t *testing.T, w *testEnv) {
			w.addContainer(t, one(w, func(c *observe.Container) { c.ID = "1" + idOne[1:] }))
		}, true},
		"a container that was removed": {func(t *testing.T, w *testEnv) { w.change(func(w *testEnv) { delete(w.containers, idOne) }); scan(t, w) }, true},
		"a task that stopped": {func(t *testing.T, w *testEnv) {
			w.addContainer(t, one(w, func(c *observe.Container) { c.State = verdict.Stopped }))
		}, true},
		"the end of the agent":       {func(_ *testing.T, w *testEnv) { w.RemovePod(agentA) }, true},
		"a Sandbox that was deleted": {func(_ *testing.T, w *testEnv) { w.erase(sandbox(uidOne, agentA, 1)) }, true},
		"another assignment":         {func(_ *testing.T, w *testEnv) { w.write(sandbox(uidOne, agentA, 2)) }, true},
		"a remnant": {func(t *testing.T, w *testEnv) {
			w.change(func(w *testEnv) { w.pieces = []ctrd.Piece{{ID: "1" + idOne[1:], Part: ctrd.PartMount}} })
			scan(t, w)
		}, true},
		"a part of a known container": {func(t *testing.T, w *testEnv) {
			w.change(func(w *testEnv) { w.pieces = []ctrd.Piece{{ID: idOne, Part: ctrd.PartMount}} })
			scan(t, w)
		}, false},
		"a part of an unknown kind": {func(t *testing.T, w *testEnv) {
			w.change(func(w *testEnv) { w.pieces = []ctrd.Piece{{ID: "1" + idOne[1:], Part: "else"}} })
			scan(t, w)
		}, false},
		"a removal that the sweep made":  {func(_ *testing.T, w *testEnv) { w.Gone(observe.Key{ID: idOne}) }, true},
		"the removal of what is unknown": {func(_ *testing.T, w *testEnv) { w.Gone(observe.Key{ID: "unknown"}) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := synced(t)
			w.alive(agentA)
			w.write(sandbox(uidOne, agentA, 1))
			w.addContainer(t, one(w))
			require.Equal(t, verdict.Assigned, w.verdict(t))
			w.clock.Step(time.Millisecond) // what follows is newer
			changed := w.Changed()
			test.do(t, w)
			select {
			case <-changed:
				require.True(t, test.want, "nothing has changed")
			default:
				require.False(t, test.want, "the change was not reported")
			}
		})
	}
}
