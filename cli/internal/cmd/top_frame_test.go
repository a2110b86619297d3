package cmd_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/cmd"
)

// TestScreen: on a terminal a text takes the place of the one before, whatever their lengths, and is not longer than the terminal.
func TestScreen(t *testing.T) {
	var out strings.Builder
	show := cmd.Screen(&out, func() int { return 3 })
	require.NoError(t, show("a\nb\n"))
	require.Equal(t, "\x1b[Ha\x1b[K\nb\x1b[K\n\x1b[J", out.String())
	out.Reset()
	require.NoError(t, show("1\n2\n3\n4\n"))
	require.Equal(t, "\x1b[H1\x1b[K\n2\x1b[K\n\x1b[J", out.String())
	out.Reset()
	show = cmd.Screen(&out, nil)
	require.NoError(t, show("a\n"))
	require.NoError(t, show("b\n"))
	require.Equal(t, "a\n\nb\n", out.String())
}
