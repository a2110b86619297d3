package edit_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/edit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// editor returns an editor whose n-th call runs the n-th script on the file "$1" and keeps a copy of what it was shown.
func editor(t *testing.T, scripts ...string) (e edit.Editor, shown func(n int) string) {
	t.Helper()
	dir := t.TempDir()
	for i, script := range scripts {
		text := fmt.Sprintf("cp \"$1\" %s/shown-%d\n%s\n", dir, i, script)
		require.NoError(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("call-%d", i)), []byte(text), 0o600))
	}
	main := filepath.Join(dir, "editor")
	require.NoError(t, os.WriteFile(main, []byte(fmt.Sprintf("n=$(cat %[1]s/n 2>/dev/null || echo 0)\necho $((n+1)) > %[1]s/n\n. %[1]s/call-$n\n", dir)), 0o600))
	return edit.Editor{Command: "sh " + main, Pattern: "edit-*.yaml", In: strings.NewReader(""), Out: &bytes.Buffer{}, Err: &bytes.Buffer{}},
		func(n int) string {
			raw, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("shown-%d", n)))
			require.NoError(t, err)
			return string(raw)
		}
}

var errInvalid = errors.New("invalid")

const text = "# a comment\nimage: \"\"\n"

func TestLoop(t *testing.T) {
	for name, tc := range map[string]struct {
		scripts []string
		// results are the results of check, one for each call.
		results []error
		want    error
		// saved is what check saw last.
		saved string
	}{
		"valid at once":           {[]string{`echo "image: a" > "$1"`}, []error{nil}, nil, "image: a\n"},
		"unchanged":               {[]string{`true`}, nil, edit.ErrUnchanged, ""},
		"only comments changed":   {[]string{`printf '# other\n\nimage: ""\n' > "$1"`}, nil, edit.ErrUnchanged, ""},
		"empty":                   {[]string{`: > "$1"`}, nil, edit.ErrEmpty, ""},
		"only comments left":      {[]string{`echo "# image: a" > "$1"`}, nil, edit.ErrEmpty, ""},
		"corrected":               {[]string{`echo "image: a" > "$1"`, `echo "image: b" > "$1"`}, []error{errInvalid, nil}, nil, "image: b\n"},
		"not corrected":           {[]string{`echo "image: a" > "$1"`, `true`}, []error{errInvalid}, errInvalid, "image: a\n"},
		"given up":                {[]string{`echo "image: a" > "$1"`, `: > "$1"`}, []error{errInvalid}, edit.ErrEmpty, "image: a\n"},
		"an error that is no use": {[]string{`echo "image: a" > "$1"`}, []error{os.ErrClosed}, os.ErrClosed, "image: a\n"},
	} {
		t.Run(name, func(t *testing.T) {
			e, _ := editor(t, tc.scripts...)
			saved, calls := "", 0
			err := e.Loop(t.Context(), []byte(text), func(raw []byte) error {
				saved = string(raw)
				calls++
				return tc.results[calls-1]
			}, func(err error) bool { return errors.Is(err, errInvalid) })
			require.ErrorIs(t, err, tc.want)
			require.Equal(t, len(tc.results), calls)
			require.Equal(t, tc.saved, saved)
		})
	}
}

// TestErrorIsAComment checks that each edit shows the last error, and only that.
func TestErrorIsAComment(t *testing.T) {
	e, shown := editor(t, `echo "image: a" > "$1"`, `sed -i s/a$/b/ "$1"`, `sed -i s/b$/c/ "$1"`)
	results := []error{errors.New("first\nline two"), errors.New("second"), nil}
	require.NoError(t, e.Loop(t.Context(), []byte(text), func([]byte) error {
		err := results[0]
		results = results[1:]
		return err
	}, func(error) bool { return true }))
	require.Equal(t, text, shown(0))
	require.Equal(t, "# error: first\n# error: line two\nimage: a\n", shown(1))
	require.Equal(t, "# error: second\nimage: b\n", shown(2))
}

func TestEditorFails(t *testing.T) {
	check := func([]byte) error { return nil }
	e, _ := editor(t, `exit 3`)
	require.ErrorContains(t, e.Loop(t.Context(), []byte(text), check, nil), "running the editor")
	e.Command = "/nonexistent/editor --wait"
	require.ErrorContains(t, e.Loop(t.Context(), []byte(text), check, nil), "/nonexistent/editor --wait")
	e, _ = editor(t, `rm "$1"`)
	require.ErrorContains(t, e.Loop(t.Context(), []byte(text), check, nil), "reading the edited file")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	e, _ = editor(t, `true`)
	require.ErrorIs(t, e.Loop(ended, []byte(text), check, nil), context.Canceled)
}
