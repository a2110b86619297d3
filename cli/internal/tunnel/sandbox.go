package tunnel

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// Sandbox returns a custom resource. Safe to retry.
func (c *Cluster) Sandbox(ctx context.Context, namespace, name string) (*v1alpha1.Sandbox, error) {
	path := []string{"/apis", v1alpha1.GroupVersion.Group, v1alpha1.GroupVersion.Version, "namespaces", namespace, "sandboxes", name}
	raw, err := c.core.Get().AbsPath(path...).SetHeader("Accept", "application/json").Do(ctx).Raw()
	if err != nil {
		return nil, refused("getting sandbox "+name, err)
	}
	s := &v1alpha1.Sandbox{}
	if err := json.Unmarshal(raw, s); err != nil {
		return nil, fmt.Errorf("reading sandbox %s: %w", name, err)
	}
	return s, nil
}
