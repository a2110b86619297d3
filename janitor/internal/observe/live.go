package observe

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// apiTimeout bounds a request to the API server.
const apiTimeout = 10 * time.Second

// Live implements API. Create it with NewLive.
type Live struct {
	reader client.Reader
	node   string

	running sync.Mutex // held over a list of Pods
	mu      sync.Mutex
	next    *podList // not begun yet
}

// podList is one answer that several callers share.
type podList struct {
	done chan struct{}
	uids map[string]bool
	err  error
}

// NewLive returns an API for one node. reader must not cache.
func NewLive(reader client.Reader, node string) *Live { return &Live{reader: reader, node: node} }

var _ API = (*Live)(nil)

// Pods implements API. Callers that arrive while a list is in progress share the next one, so that every answer is as fresh as the
// call.
func (l *Live) Pods(ctx context.Context) (map[string]bool, error) {
	l.mu.Lock()
	list, first := l.next, l.next == nil
	if first {
		list = &podList{done: make(chan struct{})}
		l.next = list
	}
	l.mu.Unlock()
	if first {
		l.running.Lock()
		l.mu.Lock()
		l.next = nil
		l.mu.Unlock()
		list.uids, list.err = l.list(ctx)
		close(list.done)
		l.running.Unlock()
	}
	select {
	case <-list.done:
		return list.uids, list.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *Live) list(ctx context.Context) (map[string]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	var pods corev1.PodList
	if err := l.reader.List(ctx, &pods, client.MatchingFields{"spec.nodeName": l.node}); err != nil {
		return nil, err
	}
	uids := make(map[string]bool, len(pods.Items))
	for i := range pods.Items {
		if !Ended(&pods.Items[i]) {
			uids[string(pods.Items[i].UID)] = true
		}
	}
	return uids, nil
}

// Ended reports whether a Pod has ended for good. Its containers are treated as if the Pod were gone.
func Ended(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded
}

// Sandbox implements API.
func (l *Live) Sandbox(ctx context.Context, namespace, name string) (*v1alpha1.Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	s := &v1alpha1.Sandbox{}
	err := l.reader.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, s)
	switch {
	case err == nil:
		return s, nil
	case certainlyAbsent(err):
		return nil, nil //nolint:nilnil // the answer: it does not exist
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("the API server serves no Sandboxes: %w", errors.Join(errdefs.ErrUnavailable, err))
	}
	return nil, err
}

// certainlyAbsent reports whether an answer says that the object does not exist. An API server that does not serve Sandboxes (yet)
// answers "not found" too.
func certainlyAbsent(err error) bool {
	var status apierrors.APIStatus
	if !apierrors.IsNotFound(err) || !errors.As(err, &status) {
		return false
	}
	details := status.Status().Details
	if details == nil || details.Name == "" {
		return false
	}
	for _, c := range details.Causes {
		if c.Type == metav1.CauseTypeUnexpectedServerResponse {
			return false
		}
	}
	return true
}
