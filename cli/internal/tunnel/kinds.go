package tunnel

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/kinds"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// acceptNames asks for objects without what is in them.
const acceptNames = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"

// mostNames is how many names are asked for; nobody chooses among more.
const mostNames = "500"

// Kinds returns all kinds that the API server serves. Safe to retry.
func (c *Cluster) Kinds(ctx context.Context) (kinds.List, error) {
	var out kinds.List
	for _, path := range []string{"/api", "/apis"} {
		raw, err := c.core.Get().AbsPath(path).SetHeader("Accept", kinds.Accept).Do(ctx).Raw()
		if err != nil {
			return nil, refused("asking for kinds of objects", err)
		}
		some, err := kinds.Decode(raw)
		if err != nil {
			return nil, fault.New(errdefs.ErrFailedPrecondition, ReasonCluster, "%s", err)
		}
		out = append(out, some...)
	}
	return out, nil
}

// Names returns the names of the objects of a kind in a namespace, as far as a person would read. Safe to retry.
func (c *Cluster) Names(ctx context.Context, k kinds.Kind, namespace string) ([]string, error) {
	raw, err := c.core.Get().AbsPath(k.Path(namespace)).SetHeader("Accept", acceptNames).Param("limit", mostNames).Do(ctx).Raw()
	if err != nil {
		return nil, refused("listing "+k.Resource, err)
	}
	var list struct {
		Items []struct {
			Metadata struct {
				Name string `json:"name"`
			} `json:"metadata"`
		} `json:"items"`
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("listing %s: %w", k.Resource, err)
	}
	out := make([]string, len(list.Items))
	for i := range list.Items {
		out[i] = list.Items[i].Metadata.Name
	}
	return out, nil
}
