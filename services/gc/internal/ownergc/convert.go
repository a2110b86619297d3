package ownergc

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// observed returns the metadata that the graph uses. Strings are copied; otherwise each would keep the whole list in memory.
func observed(kind graph.Kind, m *metav1.PartialObjectMetadata) graph.Object {
	o := graph.Object{
		Kind: kind, Namespace: strings.Clone(m.Namespace), Name: strings.Clone(m.Name), UID: strings.Clone(string(m.UID)),
		ResourceVersion: strings.Clone(m.ResourceVersion), Deleting: m.DeletionTimestamp != nil,
	}
	for _, f := range m.Finalizers {
		o.Finalizers = append(o.Finalizers, strings.Clone(f))
	}
	for _, r := range m.OwnerReferences {
		group, version := groupVersion(r.APIVersion)
		o.Owners = append(o.Owners, graph.Owner{
			Kind: graph.Kind{Group: strings.Clone(group), Kind: strings.Clone(r.Kind)}, Version: strings.Clone(version),
			Name: strings.Clone(r.Name), UID: strings.Clone(string(r.UID)), Block: flag(r.BlockOwnerDeletion), Controller: flag(r.Controller),
		})
	}
	return o
}

// groupVersion splits an apiVersion. The version of a malformed one is empty, which makes the reference invalid.
func groupVersion(apiVersion string) (group, version string) {
	gv, err := schema.ParseGroupVersion(apiVersion)
	if err != nil {
		return apiVersion, ""
	}
	return gv.Group, gv.Version
}

func flag(b *bool) graph.Flag {
	switch {
	case b == nil:
		return graph.Unset
	case *b:
		return graph.True
	default:
		return graph.False
	}
}

func unflag(f graph.Flag) *bool {
	if f == graph.Unset {
		return nil
	}
	return ptr.To(f == graph.True)
}

func references(owners []graph.Owner) []metav1.OwnerReference {
	out := make([]metav1.OwnerReference, 0, len(owners))
	for _, o := range owners {
		apiVersion := schema.GroupVersion{Group: o.Kind.Group, Version: o.Version}.String()
		if o.Version == "" {
			apiVersion = o.Kind.Group // keep the malformed value
		}
		out = append(out, metav1.OwnerReference{APIVersion: apiVersion, Kind: o.Kind.Kind, Name: o.Name, UID: types.UID(o.UID),
			BlockOwnerDeletion: unflag(o.Block), Controller: unflag(o.Controller)})
	}
	return out
}

// patch returns the JSON merge patch for an action. The UID and the resource version bind it to the decision.
func patch(a graph.Action) ([]byte, error) {
	metadata := map[string]any{"uid": a.Object.UID, "resourceVersion": a.Object.ResourceVersion}
	if a.Verb == graph.Finalize {
		left := slices.DeleteFunc(slices.Clone(a.Object.Finalizers), func(f string) bool { return f == a.Finalizer })
		metadata["finalizers"] = append([]string{}, left...)
	} else {
		metadata["ownerReferences"] = references(a.Owners)
	}
	body, err := json.Marshal(map[string]any{"metadata": metadata})
	if err != nil {
		return nil, fmt.Errorf("encoding a patch of %s %s: %w", a.Object.Kind, a.Object.Name, err)
	}
	return body, nil
}
