package tunnel_test

import (
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func TestSandbox(t *testing.T) {
	const path = "/apis/fast-sandbox.io/v1alpha1/namespaces/ns/sandboxes/"
	c := answers(t, map[string]string{
		path + "web":    `{"metadata":{"name":"web","namespace":"ns","annotations":{"a":"b"}},"spec":{"image":"img"}}`,
		path + "broken": `{"metadata":`,
	})
	s, err := c.Sandbox(t.Context(), "ns", "web")
	require.NoError(t, err)
	require.Equal(t, "img", s.Spec.Image)
	require.Equal(t, map[string]string{"a": "b"}, s.Annotations)
	_, err = c.Sandbox(t.Context(), "ns", "broken")
	require.ErrorContains(t, err, "reading sandbox broken")
	_, err = c.Sandbox(t.Context(), "other", "web")
	require.True(t, errdefs.IsPermissionDenied(err), "%v", err)
	require.Equal(t, tunnel.ReasonCluster, fault.ReasonOf(err))
	require.ErrorContains(t, err, "getting sandbox web")
}
