package suite_test

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

var (
	must     = suite.Attempt{Name: "must be refused"}
	expected = suite.Attempt{Name: "expected", Expected: suite.Network}
)

func TestJudge(t *testing.T) {
	refused := errors.New("permission denied")
	for name, c := range map[string]struct {
		attempt  suite.Attempt
		outcomes []suite.Outcome
		failure  string // part of it; empty for none
		refused  int
		success  int
	}{
		"refused":                  {must, []suite.Outcome{suite.NewOutcome(must.Name, "", "", refused)}, "", 1, 0},
		"nothing came of it":       {must, []suite.Outcome{suite.NewOutcome(must.Name, "", "", nil)}, "", 1, 0},
		"succeeded":                {must, []suite.Outcome{suite.NewOutcome(must.Name, "", "uid 0", nil)}, "it succeeded: uid 0", 0, 1},
		"evidence beats an error":  {must, []suite.Outcome{suite.NewOutcome(must.Name, "", "uid 0", refused)}, "it succeeded", 0, 1},
		"not made":                 {must, nil, "it was not made", 0, 0},
		"made elsewhere":           {must, []suite.Outcome{suite.NewOutcome(must.Name, "there", "", refused)}, "it was not made", 0, 0},
		"broken":                   {must, []suite.Outcome{suite.NewOutcome(must.Name, "", "", suite.Brokenf("no image: %w", refused))}, "could not be made: no image", 0, 0},
		"expected and succeeded":   {expected, []suite.Outcome{suite.NewOutcome(expected.Name, "", "connected", nil)}, "", 0, 1},
		"expected and refused":     {expected, []suite.Outcome{suite.NewOutcome(expected.Name, "", "", refused)}, "take it off the list", 1, 0},
		"succeeded and refused":    {must, []suite.Outcome{{Name: must.Name, Evidence: "e"}, {Name: must.Name, Refused: "r"}}, "it succeeded: e", 0, 1},
		"refused and succeeded":    {must, []suite.Outcome{{Name: must.Name, Refused: "r"}, {Name: must.Name, Evidence: "e"}}, "it succeeded: e", 0, 1},
		"expected and broken":      {expected, []suite.Outcome{{Name: expected.Name, Broken: "b"}}, "could not be made: b", 0, 0},
		"broken, and then refused": {must, []suite.Outcome{{Name: must.Name, Broken: "b"}, {Name: must.Name, Refused: "r"}}, "could not be made: b", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			r := suite.Judge([]suite.Planned{{Attempt: c.attempt}}, c.outcomes)
			require.Equal(t, 1, r.Attempts)
			require.Equal(t, c.refused, r.Refused)
			require.Equal(t, c.success, r.Succeeded)
			if c.failure == "" {
				require.True(t, r.Good(), "%s", r)
				return
			}
			require.False(t, r.Good())
			require.Contains(t, r.String(), c.failure)
		})
	}
}

// TestUnplanned: an outcome without a plan shows a mistake of the harness.
func TestUnplanned(t *testing.T) {
	r := suite.Judge(nil, []suite.Outcome{{Name: "x", Refused: "r"}})
	require.False(t, r.Good())
}

func TestLog(t *testing.T) {
	var l suite.Log
	l.Plan("root", must)
	l.Add(suite.NewOutcome(must.Name, "root", "", nil))
	l.Made(expected, "", "connected", nil)
	l.Unproven("z", "the kernel lacks it")
	l.Unproven("a", "the kernel lacks it")
	l.Figure("ratio", 1.5)
	r := l.Report()
	require.True(t, r.Good(), "%s", r)
	require.Equal(t, []suite.Unproven{{"a", "the kernel lacks it"}, {"z", "the kernel lacks it"}}, r.Unproven)
	var keys map[string]any
	require.NoError(t, json.Unmarshal([]byte(r.String()), &keys))
	for _, key := range []string{"attempts", "refused", "succeeded", "failures", "expected", "unproven", "figures", "seconds"} {
		require.Contains(t, keys, key)
	}
	require.Equal(t, []any{}, keys["failures"])
	require.Equal(t, suite.Network, r.Expected[0].Issue)
	l.Unproven("b", "")
	require.False(t, l.Report().Good(), "a check that cannot fail")
}
