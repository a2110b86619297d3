package store_test

import (
	"encoding/base64"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// FuzzPageToken lists with an arbitrary token, within a namespace. The page is in order and of that namespace alone, whatever key
// the token has; its own token leads on, and a token that is refused names the field.
func FuzzPageToken(f *testing.F) {
	s := newStore()
	for _, n := range []string{"b", "a-b", "a", "c"} {
		for _, ns := range []string{"x", "x-y", "z"} {
			r := record(ns + n)
			r.Record.Namespace, r.Record.Name = ns, n
			s.SetRecord(r)
		}
	}
	page, token, err := s.List(store.Filter{Namespace: "x-y"}, 2, "")
	require.NoError(f, err)
	require.Len(f, page, 2)
	encode := func(text string) string { return base64.RawURLEncoding.EncodeToString([]byte(text)) }
	for _, seed := range []string{"", token, token[:len(token)-1], token + "\n", encode("1\x00z\x00a"), encode("1\x00\x00"), encode("1\x00x-y\x00a\x00b"), encode("2\x00x\x00a"), "%"} {
		f.Add(seed, 2)
	}
	f.Fuzz(func(t *testing.T, token string, size int) {
		size = 1 + (size&0xff)%5
		last, seen := store.Key{}, 0
		for first := true; first || token != ""; first = false {
			page, next, err := s.List(store.Filter{Namespace: "x-y"}, size, token)
			if err != nil {
				require.True(t, first, "a token of ours")
				require.Equal(t, fault.InvalidField, fault.ReasonOf(err))
				return
			}
			require.LessOrEqual(t, len(page), size)
			require.True(t, next == "" || len(page) == size, "a page that is not full is the last")
			for _, sb := range page {
				require.Equal(t, "x-y", sb.GetNamespace())
				require.Greater(t, sb.GetName(), last.Name)
				last = store.Key{Namespace: sb.GetNamespace(), Name: sb.GetName()}
			}
			seen += len(page)
			if first && token != "" {
				raw, err := base64.RawURLEncoding.Strict().DecodeString(token)
				require.NoError(t, err, "one spelling for each key")
				require.Equal(t, token, encode(string(raw)))
			}
			token = next
		}
		require.LessOrEqual(t, seen, 4)
	})
}
