package ownergc_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// TestReferencesRoundTrip: a patch writes the remaining references unchanged.
func TestReferencesRoundTrip(t *testing.T) {
	refs := []metav1.OwnerReference{
		{APIVersion: "apps/v1", Kind: "Deployment", Name: "d", UID: "1", Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(false)},
		{APIVersion: "v1", Kind: "Pod", Name: "p", UID: "2"},
		{APIVersion: "a/b/c", Kind: "Odd", Name: "o", UID: "3", BlockOwnerDeletion: ptr.To(true)},
	}
	now := metav1.Now()
	o := ownergc.Observed(graph.Kind{Kind: "Pod"}, &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "x", UID: "u", ResourceVersion: "7", OwnerReferences: refs, Finalizers: []string{"f", "orphan", "g"}, DeletionTimestamp: &now}})
	require.True(t, o.Deleting)
	require.Equal(t, refs, ownergc.References(o.Owners))
	body, err := ownergc.Patch(graph.Action{Verb: graph.Patch, Object: o, Owners: o.Owners[1:2]})
	require.NoError(t, err)
	require.JSONEq(t, `{"metadata":{"uid":"u","resourceVersion":"7","ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"p","uid":"2"}]}}`, string(body))
	body, err = ownergc.Patch(graph.Action{Verb: graph.Finalize, Object: o, Finalizer: "orphan"})
	require.NoError(t, err)
	require.JSONEq(t, `{"metadata":{"uid":"u","resourceVersion":"7","finalizers":["f","g"]}}`, string(body))
	o.Finalizers = []string{"orphan"}
	body, err = ownergc.Patch(graph.Action{Verb: graph.Finalize, Object: o, Finalizer: "orphan"})
	require.NoError(t, err)
	require.JSONEq(t, `{"metadata":{"uid":"u","resourceVersion":"7","finalizers":[]}}`, string(body))
	body, err = ownergc.Patch(graph.Action{Verb: graph.Patch, Object: o, Owners: []graph.Owner{}})
	require.NoError(t, err)
	var got map[string]map[string]any
	require.NoError(t, json.Unmarshal(body, &got))
	require.Empty(t, got["metadata"]["ownerReferences"])
	require.Contains(t, got["metadata"], "ownerReferences")
}

// TestMissingResourceIsNoMissingObject: both are a 404.
func TestMissingResourceIsNoMissingObject(t *testing.T) {
	pods := schema.GroupResource{Resource: "pods"}
	require.True(t, ownergc.IsGone(apierrors.NewNotFound(pods, "p")))
	require.False(t, ownergc.IsGone(apierrors.NewGenericServerResponse(http.StatusNotFound, "get", pods, "p", "404 page not found", 0, true)))
	require.False(t, ownergc.IsGone(apierrors.NewForbidden(pods, "p", errors.New("no"))))
	require.False(t, ownergc.IsGone(nil))
}
