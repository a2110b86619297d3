// Package conflict detects another garbage collector in the cluster, such as kube-controller-manager's: two collectors would
// undo each other's decisions. A Checker creates a canary, an object whose owner does not exist, and watches whether another
// collector deletes it. Whether kube-controller-manager runs its collector cannot be seen from its flags on a managed cluster;
// the canary works everywhere.
//
// Check and Watch must not be called concurrently with each other; Spares may be called at any time.
package conflict

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"
)

// ErrFound reports that another collector is active.
var ErrFound = errors.New("another garbage collector is active in this cluster (kube-controller-manager's, " +
	"unless it runs with --controllers=*,-garbage-collector-controller): run with --mode=observe, or disable that one")

const (
	// pollInterval is the interval between reads of the canary.
	pollInterval = 500 * time.Millisecond
	// cleanupTimeout bounds the deletion of the canary.
	cleanupTimeout = 5 * time.Second
	namePrefix     = "fast-sandbox-gc-canary-"
)

// Config is what a Checker needs. All fields are required.
type Config struct {
	Client kubernetes.Interface
	// Namespace is where canaries are created.
	Namespace string
	// Window is how long a canary exists: a collector that leaves it alone for that long does not count as active.
	Window time.Duration
	// Period is the interval between the checks of Watch.
	Period time.Duration
	Clock  clock.WithTicker
}

// Checker looks for other collectors.
type Checker struct {
	Config

	mu     sync.Mutex
	canary string // the name of the present canary
}

// New returns a Checker.
func New(cfg Config) *Checker { return &Checker{Config: cfg} }

// Spares reports whether an object is the present canary, which the own collector must not delete. A canary that another
// process left behind is ordinary garbage.
func (c *Checker) Spares(kind, namespace, name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.canary != "" && name == c.canary && namespace == c.Namespace && kind == "ConfigMap"
}

func (c *Checker) spare(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.canary = name
}

// Watch checks once in each period, until ctx ends, which is no error, or another collector is found. A check that fails is
// passed to failed, which decides nothing: the next one follows.
func (c *Checker) Watch(ctx context.Context, failed func(error)) error {
	ticker := c.Clock.NewTicker(c.Period)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
		err := c.Check(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, ErrFound):
			return err
		case err != nil:
			failed(err)
		}
	}
}

// Check creates a canary and waits for the window. It returns ErrFound if another collector deletes the canary, and nil if none
// does. The canary is deleted in any case, also when ctx ends.
func (c *Checker) Check(ctx context.Context) error {
	name := namePrefix + string(uuid.NewUUID())[:8]
	c.spare(name) // before it exists: the watch may show it before Create returns
	defer c.spare("")
	maps := c.Client.CoreV1().ConfigMaps(c.Namespace)
	canary, err := maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Name:            name,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "fast-sandbox-gc-absent", UID: uuid.NewUUID()}},
	}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("creating a canary to detect another collector: %w", err)
	}
	deleted, err := c.observe(ctx, name)
	if deleted {
		return ErrFound
	}
	cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	failure := maps.Delete(cleanup, name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &canary.UID}})
	if apierrors.IsNotFound(failure) {
		return ErrFound // deleted after the last read
	}
	if failure != nil {
		failure = fmt.Errorf("deleting the canary: %w", failure)
	}
	return errors.Join(err, failure)
}

// observe reports whether the canary is deleted within the window.
func (c *Checker) observe(ctx context.Context, name string) (bool, error) {
	ticker, end := c.Clock.NewTicker(pollInterval), c.Clock.NewTimer(c.Window)
	defer ticker.Stop()
	defer end.Stop()
	for {
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-end.C():
			return false, nil
		case <-ticker.C():
			_, err := c.Client.CoreV1().ConfigMaps(c.Namespace).Get(ctx, name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return true, nil
			}
			if err != nil {
				return false, fmt.Errorf("reading the canary: %w", err)
			}
		}
	}
}
