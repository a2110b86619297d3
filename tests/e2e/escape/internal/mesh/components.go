package mesh

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// janitors is the namespace of the janitors, where they have one of their own.
const janitors = "fast-sandbox-janitor"

// Restarts returns how often each component of the mesh was restarted, by the name of its Pod.
func (m *Mesh) Restarts(ctx context.Context) (map[string]int32, error) {
	out := map[string]int32{}
	for _, namespace := range []string{System, janitors} {
		var pods corev1.PodList
		if err := m.Kube.List(ctx, &pods, client.InNamespace(namespace)); err != nil {
			return nil, fmt.Errorf("listing the components: %w", err)
		}
		for _, p := range pods.Items {
			if p.DeletionTimestamp != nil {
				continue
			}
			for _, c := range p.Status.ContainerStatuses {
				out[p.Name] += c.RestartCount
			}
		}
	}
	return out, nil
}

// PortOf returns the address of a named port of a Pod.
func PortOf(p *corev1.Pod, name string) (string, error) {
	for _, c := range p.Spec.Containers {
		for _, port := range c.Ports {
			if port.Name == name {
				return fmt.Sprintf("%s:%d", p.Status.PodIP, port.ContainerPort), nil
			}
		}
	}
	return "", fmt.Errorf("looking for port %s: Pod %s has none", name, p.Name)
}
