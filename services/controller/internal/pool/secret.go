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
	// labelManagedBy marks a Secret that this controller made and may change.
	labelManagedBy = "app.kubernetes.io/managed-by"
	managedBy      = "fast-sandbox-controller"
	// secretCheck is how often a copy that was found right is looked at again.
	secretCheck = time.Minute
)

// secrets keep a copy of the agents' certificate in each namespace that has a pool, for a Pod can mount only what is in
// its own. A Secret of that name that somebody else made is never touched.
type secrets struct {
	config Config

	mu    sync.Mutex
	right map[types.UID]rightCopy // by pool: a namespace that is made anew has other pools
}

type rightCopy struct {
	version string // of the source
	at      time.Time
}

func newSecrets(cfg Config) *secrets { return &secrets{config: cfg, right: map[types.UID]rightCopy{}} }

// mirror makes the copy for a pool, or brings it up to date. Repeating it is free for a while.
func (s *secrets) mirror(ctx context.Context, p *v1alpha1.SandboxPool) error {
	if s.config.Injection.Insecure || p.Namespace == s.config.Namespace {
		return nil
	}
	var source corev1.Secret
	key := types.NamespacedName{Namespace: s.config.Namespace, Name: s.config.Injection.TLSSecret}
	if err := s.config.Client.Get(ctx, key, &source); err != nil {
		return fmt.Errorf("reading secret %s of the agents' certificate: %w", key, err)
	}
	s.mu.Lock()
	last := s.right[p.UID]
	s.mu.Unlock()
	if last.version == source.ResourceVersion && s.config.Clock.Since(last.at) < secretCheck {
		return nil
	}
	if err := s.write(ctx, &source, p.Namespace); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.right, func(_ types.UID, c rightCopy) bool { return s.config.Clock.Since(c.at) >= secretCheck })
	s.right[p.UID] = rightCopy{source.ResourceVersion, s.config.Clock.Now()}
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
			"namespace %s has a Secret %s that is not labelled %s=%s: rename or label it", namespace, source.Name, labelManagedBy, managedBy)}
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
