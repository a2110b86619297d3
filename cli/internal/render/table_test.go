package render_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// now is the time of all tests.
var now = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

// written returns a table as text.
func written(t *testing.T, table *render.Table) string {
	t.Helper()
	var b strings.Builder
	require.NoError(t, table.Flush(&b))
	return b.String()
}

func TestTableGrows(t *testing.T) {
	table := render.NewTable("NAME", "AGE")
	var b strings.Builder
	table.Add("wide-name", "1m")
	require.NoError(t, table.Flush(&b))
	table.Add("é", "")
	table.Add("a-still-wider-name", "3m")
	require.NoError(t, table.Flush(&b))
	require.NoError(t, table.Flush(&b))
	require.Equal(t, strings.TrimPrefix(`
NAME        AGE
wide-name   1m
é                    <none>
a-still-wider-name   3m
`, "\n"), b.String())
}

// failing is a writer that fails.
type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errors.New("closed") }

func TestTableReportsWriteErrors(t *testing.T) {
	table := render.NewTable("A")
	table.Add("x")
	require.Error(t, table.Flush(failing{}))
}

func TestJSON(t *testing.T) {
	s := &sandboxv1.Sandbox{Name: "a", Status: &sandboxv1.SandboxStatus{Phase: sandboxv1.Phase_PHASE_RUNNING}}
	raw, err := render.JSON(s)
	require.NoError(t, err)
	require.Equal(t, "{\n  \"name\": \"a\",\n  \"status\": {\n    \"phase\": \"PHASE_RUNNING\"\n  }\n}\n", string(raw))
	line, err := render.Line(s)
	require.NoError(t, err)
	require.Equal(t, `{"name":"a","status":{"phase":"PHASE_RUNNING"}}`, string(line))
	list, err := render.List("sandboxes", []*sandboxv1.Sandbox{s})
	require.NoError(t, err)
	require.Contains(t, string(list), "\"sandboxes\": [\n    {\n      \"name\": \"a\"")
	list, err = render.List[*sandboxv1.Sandbox]("sandboxes", nil)
	require.NoError(t, err)
	require.Equal(t, "{\n  \"sandboxes\": []\n}\n", string(list))
	yaml, err := render.YAML(raw)
	require.NoError(t, err)
	require.Equal(t, "name: a\nstatus:\n  phase: PHASE_RUNNING\n", string(yaml))
	_, err = render.YAML([]byte("{"))
	require.Error(t, err)
}

func TestAge(t *testing.T) {
	for age, want := range map[time.Duration]string{0: "0s", 90 * time.Second: "90s", 5 * time.Minute: "5m", 50 * time.Hour: "2d2h"} {
		require.Equal(t, want, render.Age(now.Add(-age), now))
	}
	require.Equal(t, "<unknown>", render.Age(time.Unix(0, 0), now))
}

func TestMillis(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0.00", 12 * time.Microsecond: "0.01", 999 * time.Microsecond: "1.00", 1449 * time.Microsecond: "1.4",
		53210 * time.Microsecond: "53.2", 1234567 * time.Microsecond: "1235",
	} {
		require.Equal(t, want, render.Millis(d), d)
	}
}
