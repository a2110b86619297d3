package users

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// CheckRules fails the test for a method of the services that has neither a rule nor is listed as closed to users, and for a rule
// whose namespace or name is no field of the request or that asks for nothing.
func CheckRules(t testing.TB, rules map[string]rpc.Rule, closed []string, services ...protoreflect.ServiceDescriptor) {
	t.Helper()
	known := map[string]bool{}
	for _, s := range services {
		for i := range s.Methods().Len() {
			m := s.Methods().Get(i)
			name := "/" + string(s.FullName()) + "/" + string(m.Name())
			known[name] = true
			r, ok := rules[name]
			assert.NotEqual(t, ok, slices.Contains(closed, name), "%s must have a rule or be closed", name)
			if !ok || r.Self || r.Elsewhere {
				continue
			}
			assert.NotEmpty(t, r.Access.Verb, name)
			assert.NotEmpty(t, r.Access.Resource, name)
			assert.True(t, r.Name == "" || rpc.HasField(m.Input(), r.Name), "%s: the request has no field %s", name, r.Name)
			if r.Namespace != "" {
				assert.True(t, rpc.HasField(m.Input(), r.Namespace), "%s: the request has no field %s", name, r.Namespace)
			} else {
				assert.False(t, rpc.HasField(m.Input(), "namespace"), "%s: the rule ignores the namespace of the request", name)
			}
		}
	}
	for name := range rules {
		assert.True(t, known[name], "%s is no method of the services", name)
	}
}
