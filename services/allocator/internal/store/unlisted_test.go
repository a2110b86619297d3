package store_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// TestUnlisted: only a custom resource that a list of its time would have is gone if the list does not have it.
func TestUnlisted(t *testing.T) {
	s := newStore()
	listed, deleted, newer := resource("a", "5", ""), resource("b", "6", ""), resource("c", "8", "")
	deleted.Name, newer.Name = "second", "third"
	for _, sb := range []*v1alpha1.Sandbox{listed, deleted, newer} {
		s.SetResource(sb)
	}
	s.SetRecord(record("unwritten"))
	missing := s.Unlisted(map[types.UID]struct{}{listed.UID: {}}, "7")
	require.Len(t, missing, 1)
	require.Equal(t, deleted.Name, missing[0].Name)
	require.Equal(t, deleted.UID, missing[0].UID)
}
