package fields_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/fields"
)

func TestPoolOf(t *testing.T) {
	require.Empty(t, fields.PoolOf(&corev1.Pod{}))
	require.Empty(t, fields.PoolOf(&v1alpha1.Sandbox{}), "the pool is not resolved yet")
	require.Equal(t, []string{"p"}, fields.PoolOf(&v1alpha1.Sandbox{Status: v1alpha1.SandboxStatus{Pool: "p"}}))
	require.Equal(t, []string{"q"}, fields.PoolOf(&v1alpha1.Sandbox{Spec: v1alpha1.SandboxSpec{PoolRef: "q"}}))
}

func TestAgentOf(t *testing.T) {
	require.Empty(t, fields.AgentOf(&corev1.Pod{}))
	s := &v1alpha1.Sandbox{}
	require.Empty(t, fields.AgentOf(s))
	s.SetAssignment(&v1alpha1.Assignment{AgentUID: "a", SandboxUID: "s", Attempt: 1})
	require.Equal(t, []string{"a"}, fields.AgentOf(s))
	s.Annotations[v1alpha1.AnnotationAssignment] = "{"
	require.Empty(t, fields.AgentOf(s))
}

// indexer records the names of indexes.
type indexer struct {
	names map[string]bool
	err   error
}

// IndexField implements client.FieldIndexer.
func (i *indexer) IndexField(_ context.Context, _ client.Object, name string, _ client.IndexerFunc) error {
	i.names[name] = true
	return i.err
}

func TestRegister(t *testing.T) {
	i := &indexer{names: map[string]bool{}}
	require.NoError(t, fields.Register(t.Context(), i))
	require.Equal(t, map[string]bool{fields.Agent: true, fields.Pool: true}, i.names)
	i.err = errors.New("started")
	require.ErrorIs(t, fields.Register(t.Context(), i), i.err)
}
