package desired_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

func TestCountSlots(t *testing.T) {
	ready := desired.SlotAgent{Free: 2, Wanted: 3}
	full := desired.SlotAgent{}
	empty := desired.SlotAgent{Wanted: 1, Idle: true}
	unreported := desired.SlotAgent{Idle: true}
	off := func(why string) desired.SlotAgent { return desired.SlotAgent{OffReason: why, Idle: true} }
	for name, tc := range map[string]struct {
		agents  []desired.SlotAgent
		free    int
		reason  string
		message string
	}{
		"none":                          {nil, 0, "AgentsNotReady", "no agent is ready"},
		"all have some":                 {[]desired.SlotAgent{ready, ready}, 4, "SlotsFree", ""},
		"a full agent needs none":       {[]desired.SlotAgent{ready, full}, 2, "SlotsFree", ""},
		"all full":                      {[]desired.SlotAgent{full}, 0, "SlotsFree", ""},
		"one has run out":               {[]desired.SlotAgent{ready, empty}, 2, "SlotsRefilling", "agents have no free slot and are starting some"},
		"one does not report slots":     {[]desired.SlotAgent{unreported, empty, ready}, 2, "SlotsNotReported", "agents report no slots: their version may be older than slots"},
		"one cannot":                    {[]desired.SlotAgent{ready, unreported, off("no fsopen")}, 2, "SlotsOff", "1 of 3 agents keep no slots: no fsopen"},
		"one cannot, and still has one": {[]desired.SlotAgent{{Free: 1, OffReason: "memory is short"}}, 1, "SlotsOff", "1 of 1 agents keep no slots: memory is short"},
		"duplicate reasons":             {[]desired.SlotAgent{off("a"), off("b"), off("a")}, 0, "SlotsOff", "3 of 3 agents keep no slots: a; b"},
		"three reasons":                 {[]desired.SlotAgent{off("c"), off("b"), off("a")}, 0, "SlotsOff", "3 of 3 agents keep no slots: a; b; c"},
		"too many reasons":              {[]desired.SlotAgent{off("e"), off("d"), off("c"), off("b"), off("a")}, 0, "SlotsOff", "5 of 5 agents keep no slots: a; b; c; and 2 more reasons"},
		"reasons are sorted":            {[]desired.SlotAgent{off("b"), off("a")}, 0, "SlotsOff", "2 of 2 agents keep no slots: a; b"},
		"reasons in order":              {[]desired.SlotAgent{off("a"), off("b")}, 0, "SlotsOff", "2 of 2 agents keep no slots: a; b"},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, desired.Slots{Free: tc.free, Ready: tc.reason == "SlotsFree", Reason: tc.reason, Message: tc.message}, desired.CountSlots(tc.agents))
		})
	}
}
