package console_test

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/console"
)

func TestDetacher(t *testing.T) {
	for _, c := range []struct {
		in, out  string
		detached bool
	}{
		{in: "abc", out: "abc"},
		{in: "ab\x10\x11cd", out: "ab", detached: true},
		{in: "\x10x\x10\x10y\x11", out: "\x10x\x10\x10y\x11"},
		{in: "\x10\x10\x11", out: "\x10", detached: true},
		{in: "a\x10", out: "a\x10"},
		{in: "\x11", out: "\x11"},
	} {
		for name, reader := range map[string]func(io.Reader) io.Reader{
			"at once": func(r io.Reader) io.Reader { return r }, "by byte": iotest.OneByteReader, "with its end": iotest.DataErrReader,
		} {
			d := console.NewDetacher(reader(strings.NewReader(c.in)))
			var out strings.Builder
			_, err := io.Copy(&out, struct{ io.Reader }{d})
			require.Equal(t, c.detached, errors.Is(err, console.ErrDetached), "%q %s: %v", c.in, name, err)
			require.Equal(t, c.out, out.String(), "%q %s", c.in, name)
		}
	}
	d := console.NewDetacher(strings.NewReader(strings.Repeat("\x10x", 100)))
	small := make([]byte, 1)
	n := 0
	for {
		m, err := d.Read(small)
		n += m
		if err != nil {
			break
		}
	}
	require.Equal(t, 200, n)
	require.False(t, console.Is(strings.NewReader("")))
	rows, columns := console.Size(nil)
	require.Zero(t, rows+columns)
}
