// Package rival finds out whether somebody else collects garbage in a cluster, as kube-controller-manager does: two
// collectors would get into each other's way. It puts out bait, an object whose owner does not exist, and looks whether it
// is taken. Nobody of this process may collect meanwhile.
package rival

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"
)

// ErrFound tells that another collector is at work.
var ErrFound = errors.New("another garbage collector is at work in this cluster (kube-controller-manager's, " +
	"unless it runs with --controllers=*,-garbage-collector-controller): run with --mode=observe, or turn that one off")

// poll is the time between looks.
const poll = 200 * time.Millisecond

// Look puts bait into a namespace and waits for at most patience for somebody to take it: ErrFound, or nil if nobody does.
// The bait is taken away in any case.
func Look(ctx context.Context, client kubernetes.Interface, namespace string, patience time.Duration, clk clock.WithTicker) error {
	maps := client.CoreV1().ConfigMaps(namespace)
	bait, err := maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		GenerateName:    "fast-sandbox-gc-bait-",
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "fast-sandbox-gc-nobody", UID: uuid.NewUUID()}},
	}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("looking for another collector: %w", err)
	}
	taken, err := watched(ctx, client, bait, patience, clk)
	if taken {
		return ErrFound
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	gone := maps.Delete(end, bait.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &bait.UID}})
	if apierrors.IsNotFound(gone) {
		return ErrFound // at the last moment
	}
	if gone != nil {
		gone = fmt.Errorf("taking the bait away: %w", gone)
	}
	return errors.Join(err, gone)
}

// watched tells whether the bait is taken within patience.
func watched(ctx context.Context, client kubernetes.Interface, bait *corev1.ConfigMap, patience time.Duration, clk clock.WithTicker) (bool, error) {
	ticker, end := clk.NewTicker(poll), clk.NewTimer(patience)
	defer ticker.Stop()
	defer end.Stop()
	for {
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-end.C():
			return false, nil
		case <-ticker.C():
			_, err := client.CoreV1().ConfigMaps(bait.Namespace).Get(ctx, bait.Name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return true, nil
			}
			if err != nil {
				return false, fmt.Errorf("looking at the bait: %w", err)
			}
		}
	}
}
