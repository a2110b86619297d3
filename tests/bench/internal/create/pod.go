package create

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
)

// podTime bounds the start of a Pod, and its end.
const podTime = time.Minute

// pod is a Pod of plain Kubernetes, from its create call until a watcher observes that it is Ready.
func (s *suite) pod(ctx context.Context, n int) error {
	ctx, cancel := context.WithTimeout(ctx, podTime)
	defer cancel()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: mesh.Namespace, Name: "bench-" + uuid.NewString()[:13]},
		Spec: corev1.PodSpec{
			AutomountServiceAccountToken: ptr.To(false), EnableServiceLinks: ptr.To(false), TerminationGracePeriodSeconds: ptr.To[int64](1),
			Containers: []corev1.Container{{Name: "main", Image: mesh.Image, Command: mesh.Command(), ImagePullPolicy: corev1.PullIfNotPresent}},
		},
	}
	w, err := s.Kube.Watch(ctx, &corev1.PodList{}, client.InNamespace(mesh.Namespace),
		client.MatchingFieldsSelector{Selector: fields.OneTermEqualSelector("metadata.name", pod.Name)})
	if err != nil {
		return fmt.Errorf("watching a Pod: %w", err)
	}
	defer w.Stop()
	at := time.Now()
	if err := s.Kube.Create(ctx, pod); err != nil {
		return fmt.Errorf("creating a Pod: %w", err)
	}
	err = until(ctx, w, func(e watch.Event) bool { return ready(e.Object) })
	took := time.Since(at)
	if err == nil {
		s.add(Pod, n, at, took, "")
	}
	// Not with a grace of zero: the API server would no longer have the Pod while the kubelet still terminates it.
	if deleteErr := s.Kube.Delete(context.WithoutCancel(ctx), pod); deleteErr != nil {
		return errors.Join(err, fmt.Errorf("deleting a Pod: %w", deleteErr))
	}
	if err != nil {
		return err
	}
	return until(ctx, w, func(e watch.Event) bool { return e.Type == watch.Deleted })
}

// until reads events to the first that will do.
func until(ctx context.Context, w watch.Interface, will func(watch.Event) bool) error {
	for {
		select {
		case e, ok := <-w.ResultChan():
			if !ok {
				return errors.New("watching a Pod: the watch has ended")
			}
			if will(e) {
				return nil
			}
		case <-ctx.Done():
			return fmt.Errorf("watching a Pod: %w", ctx.Err())
		}
	}
}

func ready(o any) bool {
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return false
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
