package pool

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// A message that is cut must stay valid UTF-8, which Kubernetes requires of every string.
func TestTruncateKeepsCharacters(t *testing.T) {
	require.Equal(t, "short", truncate("short"))
	require.Len(t, truncate(strings.Repeat("x", 2000)), 900)
	require.True(t, utf8.ValidString(truncate(strings.Repeat("x", 899)+"é")), "a character was cut in two")
}
