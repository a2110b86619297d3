package pool

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

const (
	// labelManagedBy marks a Secret that this controller has created and may change.
	labelManagedBy = "app.kubernetes.io/managed-by"
	managedBy      = "fast-sandbox-controller"
	// secretCheck is the interval at which an up-to-date copy is checked again.
	secretCheck = time.Minute
)

// secrets copies the agents' certificate to each namespace that has a pool, because a Pod can only mount Secrets of its own
// namespace. A Secret of that name that this controller has not created is never changed.
type secrets struct {
	config Config

	mu      sync.Mutex
	checked map[types.UID]checkedCopy // by pool: a namespace that is created again has other pools
}

type checkedCopy struct {
	version string // of the source
	at      time.Time
}

func newSecrets(cfg Config) *secrets {
	return &secrets{config: cfg, checked: map[types.UID]checkedCopy{}}
}

// mirror creates the copy for a pool, or updates it. Its result is cached for secretCheck.
func (s *secrets) mirror(ctx context.Context, p *v1alpha1.SandboxPool) error {
	if s.config.Injection.Insecure || p.Namespace == s.config.Namespace {
		return nil
	}
	var source corev1.Secret
	key := types.NamespacedName{Namespace: s.config.Namespace, Name: s.config.Injection.TLSSecret}
	if err := s.config.Client.Get(ctx, key, &source); err != nil {
		return fmt.Errorf("reading secret %s with the agents' certificate: %w", key, err)
	}
	s.mu.Lock()
	last := s.checked[p.UID]
	s.mu.Unlock()
	if last.version == source.ResourceVersion && s.config.Clock.Since(last.at) < secretCheck {
		return nil
	}
	if err := s.write(ctx, &source, p.Namespace); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.checked, func(_ types.UID, c checkedCopy) bool { return s.config.Clock.Since(c.at) >= secretCheck })
	s.checked[p.UID] = checkedCopy{source.ResourceVersion, s.config.Clock.Now()}
	return nil
}

func (s *secrets) write(ctx context.Context, source *corev1.Secret, namespace string) error {
	labels := map[string]string{labelManagedBy: managedBy}
	var there corev1.Secret
	err := s.config.Live.Get(ctx, types.NamespacedName{Namespace: namespace, Name: source.Name}, &there)
	switch {
	case apierrors.IsNotFound(err):
		err = s.config.Client.Create(ctx, &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: source.Name, Labels: labels},
			Type:       source.Type, Data: source.Data,
		})
	case err != nil:
	case there.Labels[labelManagedBy] != managedBy:
		return &templateError{reason: "SecretConflict", message: fmt.Sprintf(
			"namespace %s has a Secret %s that is not labeled %s=%s: rename or label it", namespace, source.Name, labelManagedBy, managedBy)}
	case equality.Semantic.DeepEqual(there.Data, source.Data):
	default:
		next := there.DeepCopy()
		next.Data = maps.Clone(source.Data)
		err = s.config.Client.Patch(ctx, next, client.MergeFromWithOptions(&there, client.MergeFromWithOptimisticLock{}))
	}
	if err != nil {
		return fmt.Errorf("copying secret %s to namespace %s: %w", source.Name, namespace, err)
	}
	return nil
}
