package edge_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/edge"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/users"
)

// TestRules: every method has a rule, and those that agents or this process serve are decided here.
func TestRules(t *testing.T) {
	rules := edge.Rules()
	ours := map[string]bool{}
	for _, s := range slices.Concat(edge.OfAgents, edge.OfGateway) {
		for i := range s.Methods().Len() {
			ours["/"+string(s.FullName())+"/"+string(s.Methods().Get(i).Name())] = true
		}
	}
	for method, rule := range rules {
		require.Equal(t, !ours[method], rule.Elsewhere, method)
	}
	users.CheckRules(t, rules, nil, slices.Concat(edge.OfAllocator, edge.OfCollector, edge.OfAgents, edge.OfGateway)...)
}
