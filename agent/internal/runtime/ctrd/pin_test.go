package ctrd_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
)

// TestPinChange tries an image in every combination of uses and labels.
func TestPinChange(t *testing.T) {
	const (
		pinned = "io.cri-containerd.pinned"
		ours   = "fast-sandbox.io/pinned"
		mine   = "fast-sandbox.io/pinned-until.me"
		other  = "fast-sandbox.io/pinned-until.other"
	)
	now := time.Unix(100000, 0)
	at := func(minutes int) string {
		return now.Add(time.Duration(minutes) * time.Minute).UTC().Format(time.RFC3339)
	}
	type labels = map[string]string
	for _, c := range []struct {
		name         string
		labels       labels
		used, listed bool
		want         labels
	}{
		{"unused", nil, false, false, labels{}},
		{"used", nil, true, false, labels{pinned: "pinned", ours: "pinned"}},
		{"used, pinned", labels{pinned: "pinned", ours: "pinned"}, true, false, labels{}},
		{"no longer used", labels{pinned: "pinned", ours: "pinned"}, false, false, labels{pinned: "", ours: ""}},
		{"pinned by another component", labels{pinned: "pinned"}, false, false, labels{}},
		{"used, pinned by another component", labels{pinned: "pinned"}, true, false, labels{}},
		{"listed", nil, false, true, labels{pinned: "pinned", ours: "pinned", mine: at(10)}},
		{"listed, fresh", labels{pinned: "pinned", ours: "pinned", mine: at(6)}, false, true, labels{}},
		{"listed, to be renewed", labels{pinned: "pinned", ours: "pinned", mine: at(4)}, false, true, labels{mine: at(10)}},
		{"no longer listed", labels{pinned: "pinned", ours: "pinned", mine: at(6)}, false, false, labels{pinned: "", ours: "", mine: ""}},
		{"no longer listed, used", labels{pinned: "pinned", ours: "pinned", mine: at(6)}, true, false, labels{mine: ""}},
		{"listed by another agent", labels{pinned: "pinned", ours: "pinned", other: at(1)}, false, false, labels{}},
		{"listed by another agent, not pinned", labels{other: at(1)}, false, false, labels{pinned: "pinned", ours: "pinned"}},
		{"listed by an agent that is gone", labels{pinned: "pinned", ours: "pinned", other: at(-1)}, false, false, labels{pinned: "", ours: "", other: ""}},
		{"listed here, and by an agent that is gone", labels{pinned: "pinned", ours: "pinned", mine: at(9), other: at(-1)}, false, true, labels{other: ""}},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Equal(t, c.want, ctrd.PinChange(c.labels, c.used, c.listed, "me", now))
		})
	}
}
