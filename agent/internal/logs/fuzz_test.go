package logs_test

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
)

// indexOf encodes index entries: pairs of seconds and an offset.
func indexOf(pairs ...int64) []byte {
	var out []byte
	for i := 0; i+1 < len(pairs); i += 2 {
		out = binary.LittleEndian.AppendUint64(out, uint64(time.Unix(pairs[i], 0).UnixNano()))
		out = binary.LittleEndian.AppendUint64(out, uint64(pairs[i+1]))
	}
	return out
}

// FuzzIndex reads a log whose index is arbitrary, as after a crash of the node. What is read is the end of the log, from a line's
// beginning on, with the last lines that were asked for; a later Since never reads more.
func FuzzIndex(f *testing.F) {
	f.Add([]byte("one\ntwo\nthree\n"), indexOf(10, 4, 11, 8, 12, 14), int64(11e9), int64(-1))
	f.Add([]byte("one\ntwo\nthr"), indexOf(10, 4, 11, 8)[:20], int64(10e9), int64(2))
	f.Add([]byte("one\n"), indexOf(10, 400), int64(12e9), int64(-1)) // the index was written, the log was not
	f.Add([]byte("one\ntwo\n"), indexOf(10, 4, 9, 2, -5, -8), int64(9e9), int64(1))
	f.Add([]byte(strings.Repeat("a long line\n", 4000)), indexOf(1, 12, 2, 24_000), int64(2e9), int64(-1))
	dir := f.TempDir()
	s := logs.New(logs.Config{Root: dir, Owner: "me"})
	paths, err := s.Create("u-1", "host")
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, text, index []byte, since, tail int64) {
		require.NoError(t, os.WriteFile(paths.Output, text, 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(paths.Output), "index"), index, 0o600))
		read := func(o logs.Options) []byte {
			var out bytes.Buffer
			err := s.Read(t.Context(), "u-1", o, nil, func(p []byte) error {
				require.LessOrEqual(t, len(p), 32<<10)
				out.Write(p)
				return nil
			})
			require.NoError(t, err)
			return out.Bytes()
		}
		require.True(t, bytes.Equal(text, read(logs.Options{Tail: -1})), "all of it")
		for _, o := range []logs.Options{{Tail: tail}, {Tail: -1, Since: time.Unix(0, since)}, {Tail: tail, Since: time.Unix(0, since)}} {
			got := read(o)
			require.True(t, bytes.HasSuffix(text, got))
			before := text[:len(text)-len(got)]
			require.True(t, len(before) == 0 || len(got) == 0 || before[len(before)-1] == '\n', "within a line")
			if o.Tail >= 0 {
				lines := bytes.Count(got, []byte("\n"))
				if n := len(got); n > 0 && got[n-1] != '\n' {
					lines++
				}
				require.LessOrEqual(t, int64(lines), o.Tail)
				if o.Since.IsZero() && len(before) > 0 && o.Tail > 0 {
					require.Equal(t, o.Tail, int64(lines), "as many as there are")
				}
			}
		}
		// Of two moments the later one.
		if since < 1<<62 {
			earlier, later := read(logs.Options{Tail: -1, Since: time.Unix(0, since)}), read(logs.Options{Tail: -1, Since: time.Unix(0, since+1)})
			require.GreaterOrEqual(t, len(earlier), len(later))
		}
	})
}
