package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/pki"
)

const rolloutTimeout = 3 * time.Minute

// waitRollouts waits until every Deployment and DaemonSet of Fast Sandbox runs its newest template.
func waitRollouts(ctx context.Context, set kubernetes.Interface, p *progress) error {
	ctx, cancel := context.WithTimeout(ctx, rolloutTimeout)
	defer cancel()
	var total int
	err := host.Poll(ctx, readyInterval, func(ctx context.Context) error {
		pending, count, err := pendingRollouts(ctx, set)
		if err != nil {
			return err
		}
		total = count
		if len(pending) > 0 {
			return errors.New("not rolled out: " + strings.Join(pending, ", "))
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("waiting for the rollout: %w\n%s", err, podProblems(context.WithoutCancel(ctx), set))
	}
	p.say("%d workloads in %s are ready", total, strings.Join(pki.Namespaces(), ", "))
	return nil
}

func pendingRollouts(ctx context.Context, set kubernetes.Interface) (pending []string, total int, err error) {
	for _, namespace := range pki.Namespaces() {
		in, count, err := pendingIn(ctx, set, namespace)
		if err != nil {
			return nil, 0, err
		}
		pending, total = append(pending, in...), total+count
	}
	return pending, total, nil
}

func pendingIn(ctx context.Context, set kubernetes.Interface, namespace string) (pending []string, total int, err error) {
	deployments, err := set.AppsV1().Deployments(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, 0, fmt.Errorf("listing deployments: %w", err)
	}
	for _, d := range deployments.Items {
		want := int32(1)
		if d.Spec.Replicas != nil {
			want = *d.Spec.Replicas
		}
		s := d.Status
		if s.ObservedGeneration < d.Generation || s.UpdatedReplicas < want || s.AvailableReplicas < want || s.Replicas > want {
			pending = append(pending, fmt.Sprintf("deployment %s (%d of %d)", d.Name, min(s.UpdatedReplicas, s.AvailableReplicas), want))
		}
	}
	daemons, err := set.AppsV1().DaemonSets(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, 0, fmt.Errorf("listing daemon sets: %w", err)
	}
	for _, d := range daemons.Items {
		s := d.Status
		want := s.DesiredNumberScheduled
		if s.ObservedGeneration < d.Generation || s.UpdatedNumberScheduled < want || s.NumberAvailable < want {
			pending = append(pending, fmt.Sprintf("daemonset %s (%d of %d)", d.Name, s.NumberAvailable, want))
		}
	}
	return pending, len(deployments.Items) + len(daemons.Items), nil
}

// podProblems returns one line for each reason why a Pod of Fast Sandbox is not ready.
func podProblems(ctx context.Context, set kubernetes.Interface) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var all []corev1.Pod
	for _, namespace := range pki.Namespaces() {
		pods, err := set.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err.Error()
		}
		all = append(all, pods.Items...)
	}
	var lines []string
	for _, pod := range all {
		for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
			if problem := containerProblem(status); problem != "" {
				lines = append(lines, fmt.Sprintf("pod %s, container %s: %s", pod.Name, status.Name, problem))
			}
		}
		for _, condition := range pod.Status.Conditions {
			if condition.Type == corev1.PodScheduled && condition.Status != corev1.ConditionTrue {
				lines = append(lines, fmt.Sprintf("pod %s: %s", pod.Name, condition.Message))
			}
		}
	}
	return strings.Join(lines, "\n")
}

func containerProblem(status corev1.ContainerStatus) string {
	switch {
	case status.Ready:
		return ""
	case status.State.Waiting != nil:
		text := status.State.Waiting.Reason + " " + status.State.Waiting.Message
		if last := status.LastTerminationState.Terminated; last != nil {
			text += fmt.Sprintf(" (exited with code %d %s)", last.ExitCode, last.Message)
		}
		return text
	case status.State.Terminated != nil:
		return fmt.Sprintf("exited with code %d %s", status.State.Terminated.ExitCode, status.State.Terminated.Message)
	}
	return "runs, but is not ready"
}
