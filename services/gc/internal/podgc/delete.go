package podgc

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/podgc/plan"
)

// reasonDeletionByPodGC is the condition's reason, the same as kube-controller-manager's.
const reasonDeletionByPodGC = "DeletionByPodGC"

// delete sets the phase of an unfinished Pod to Failed, so that its owner (a Job) learns that it ended, and deletes it without
// grace: no kubelet is left to end it. A Pod that is gone, or was replaced under the same name, is no error.
func (c *Collector) delete(ctx context.Context, d plan.Deletion) error {
	pods := c.Client.CoreV1().Pods(d.Pod.Namespace)
	if d.Fail {
		body, err := failing(d, metav1.NewTime(c.Clock.Now()))
		if err != nil {
			return err
		}
		_, err = pods.Patch(ctx, d.Pod.Name, types.StrategicMergePatchType, body, metav1.PatchOptions{}, "status")
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("setting the phase of %s/%s: %w", d.Pod.Namespace, d.Pod.Name, err)
		}
	}
	err := pods.Delete(ctx, d.Pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: ptr.To(int64(0)), Preconditions: &metav1.Preconditions{UID: ptr.To(types.UID(d.Pod.UID))}})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting %s/%s: %w", d.Pod.Namespace, d.Pod.Name, err)
	}
	return nil
}

// failing returns the patch of a Pod's status. The UID binds it to this Pod; conditions merge by type.
func failing(d plan.Deletion, now metav1.Time) ([]byte, error) {
	status := map[string]any{"phase": corev1.PodFailed}
	if d.Disrupted {
		status["conditions"] = []map[string]any{{
			"type": corev1.DisruptionTarget, "status": corev1.ConditionTrue, "reason": reasonDeletionByPodGC,
			"message": "PodGC: node no longer exists", "lastTransitionTime": now,
		}}
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": d.Pod.UID}, "status": status})
	if err != nil {
		return nil, fmt.Errorf("encoding the status of %s/%s: %w", d.Pod.Namespace, d.Pod.Name, err)
	}
	return body, nil
}
