package pool

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// labelManagedBy marks what this controller has created.
	labelManagedBy = "app.kubernetes.io/managed-by"
	managedBy      = "fast-sandbox-controller"
	// certificateCheck is the interval at which a certificate that need not be renewed is checked: its Secret may have been changed or
	// deleted, or the authority replaced.
	certificateCheck = 10 * time.Minute
	// pendingCheck is the interval at which a certificate that was requested is asked for.
	pendingCheck = time.Second
)

// Issuer issues the certificates of agents. *issuer.Issuer and *certmanager.Requests implement it.
type Issuer interface {
	// Issue returns a new certificate as the data of a Secret; nil while one that was requested elsewhere is not there yet.
	Issue(ctx context.Context, id rpc.AgentID, now time.Time) (map[string][]byte, error)
	// RenewAt returns when the certificate in the data of a Secret has to be replaced; the zero time: at once.
	RenewAt(id rpc.AgentID, data map[string][]byte) (time.Time, error)
}

// certificates keeps the certificate of each agent in a Secret that its Pod alone mounts, and that is deleted with the Pod. The Secret
// can be made only after the Pod, whose uid is in the certificate; the kubelet starts the Pod once the Secret is there.
type certificates struct {
	config Config

	mu  sync.Mutex
	due map[types.NamespacedName]map[types.UID]time.Time // when the certificate of each Pod of a pool is looked at again
}

func newCertificates(cfg Config) *certificates {
	return &certificates{config: cfg, due: map[types.NamespacedName]map[types.UID]time.Time{}}
}

// secretName returns the name of the Secret with the certificate of an agent.
func secretName(pod string) string { return pod + "-tls" }

// keep renews the certificates of a pool's agents that are due, and returns the time after which to look again. It continues after an error
// with one.
func (c *certificates) keep(ctx context.Context, i *inventory) (time.Duration, error) {
	if c.config.Injection.Insecure {
		return 0, nil
	}
	c.forget(i)
	var requeue time.Duration
	var errs []error
	for _, m := range i.sorted() {
		if !mountsOwn(m.pod) {
			continue
		}
		if left := c.left(i.name, m.pod.UID); left > 0 {
			requeue = sooner(requeue, left)
			continue
		}
		left, err := c.ensure(ctx, i.name, m.pod)
		requeue = sooner(requeue, left)
		errs = append(errs, err)
	}
	return requeue, errors.Join(errs...)
}

// forget drops what is known of Pods that are gone.
func (c *certificates) forget(i *inventory) {
	there := map[types.UID]bool{}
	for _, m := range i.members {
		there[m.pod.UID] = true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.config.Clock.Now()
	// A Pod that the cache does not show yet is soon due again.
	maps.DeleteFunc(c.due[i.name], func(uid types.UID, at time.Time) bool { return !there[uid] && !now.Before(at) })
	if len(c.due[i.name]) == 0 {
		delete(c.due, i.name)
	}
}

// left returns the time until the certificate of a Pod is due.
func (c *certificates) left(pool types.NamespacedName, pod types.UID) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.due[pool][pod].Sub(c.config.Clock.Now())
}

// ensure issues the certificate of a Pod if it has none, or one that has to be replaced, and returns the time until it is looked at again.
// Another Secret of that name is taken over: the Pod mounts it.
func (c *certificates) ensure(ctx context.Context, pool types.NamespacedName, pod *corev1.Pod) (time.Duration, error) {
	id := rpc.AgentID{Namespace: pod.Namespace, Pod: pod.Name, UID: string(pod.UID)}
	now := c.config.Clock.Now()
	var there corev1.Secret
	err := c.config.Live.Get(ctx, types.NamespacedName{Namespace: pod.Namespace, Name: secretName(pod.Name)}, &there)
	found := err == nil
	if client.IgnoreNotFound(err) != nil {
		return 0, fmt.Errorf("reading the certificate of agent %s: %w", pod.Name, err)
	}
	var renewAt time.Time
	if found && metav1.IsControlledBy(&there, pod) {
		if renewAt, err = c.config.Issuer.RenewAt(id, there.Data); err != nil {
			return 0, err
		}
	}
	if !now.Before(renewAt) {
		data, err := c.config.Issuer.Issue(ctx, id, now)
		if err != nil {
			return 0, err
		}
		if data == nil {
			return pendingCheck, nil
		}
		if err := c.write(ctx, pod, &there, found, data); err != nil {
			return 0, fmt.Errorf("writing the certificate of agent %s: %w", pod.Name, err)
		}
		if renewAt, err = c.config.Issuer.RenewAt(id, data); err != nil {
			return 0, err
		}
	}
	due := min(renewAt.Sub(now), certificateCheck)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.due[pool] == nil {
		c.due[pool] = map[types.UID]time.Time{}
	}
	c.due[pool][pod.UID] = now.Add(due)
	return due, nil
}

func (c *certificates) write(ctx context.Context, pod *corev1.Pod, there *corev1.Secret, found bool, data map[string][]byte) error {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: secretName(pod.Name)}, Type: corev1.SecretTypeTLS}
	if found {
		secret = there.DeepCopy()
	}
	if secret.Labels == nil {
		secret.Labels = map[string]string{}
	}
	secret.Labels[labelManagedBy], secret.Labels[v1alpha1.LabelPool] = managedBy, pod.Labels[v1alpha1.LabelPool]
	secret.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(pod, corev1.SchemeGroupVersion.WithKind("Pod"))}
	secret.OwnerReferences[0].BlockOwnerDeletion = nil // it would need a right to the finalizers of Pods
	secret.Data = data
	if !found {
		return c.config.Client.Create(ctx, secret)
	}
	return c.config.Client.Patch(ctx, secret, client.MergeFromWithOptions(there, client.MergeFromWithOptimisticLock{}))
}

// issue issues the certificate of a Pod that was just created. The next reconcile makes up for an error.
func (c *certificates) issue(ctx context.Context, pool types.NamespacedName, pod *corev1.Pod) error {
	if c.config.Injection.Insecure {
		return nil
	}
	if _, err := c.ensure(ctx, pool, pod); err != nil && !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) {
		return err
	}
	return nil
}

// mountsOwn reports whether a Pod mounts the Secret with its own certificate. Pods of earlier versions mount one that all agents shared.
func mountsOwn(pod *corev1.Pod) bool {
	for _, v := range pod.Spec.Volumes {
		if v.Name == tlsVolume {
			return v.Secret != nil && v.Secret.SecretName == secretName(pod.Name)
		}
	}
	return false
}
