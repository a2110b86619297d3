package podgc

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Strip is a transform for informers: it keeps only the fields of Pods and nodes that this package reads. Pods are most of such a
// cache's memory.
func Strip(in any) (any, error) {
	switch o := in.(type) {
	case *corev1.Pod:
		return &corev1.Pod{ObjectMeta: slim(o.ObjectMeta), Spec: corev1.PodSpec{NodeName: o.Spec.NodeName},
			Status: corev1.PodStatus{Phase: o.Status.Phase, Reason: o.Status.Reason}}, nil
	case *corev1.Node:
		out := &corev1.Node{ObjectMeta: slim(o.ObjectMeta), Spec: corev1.NodeSpec{Taints: o.Spec.Taints}}
		for _, c := range o.Status.Conditions {
			if c.Type == corev1.NodeReady {
				out.Status.Conditions = append(out.Status.Conditions, c)
			}
		}
		return out, nil
	}
	return in, nil
}

func slim(m metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion,
		CreationTimestamp: m.CreationTimestamp, DeletionTimestamp: m.DeletionTimestamp}
}
