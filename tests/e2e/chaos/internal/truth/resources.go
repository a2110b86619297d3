package truth

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
)

// GarbageLabel marks the ConfigMaps that the harness makes for the garbage collector: owners, and their dependents.
const GarbageLabel = "fast-sandbox.io/chaos"

// history records the uids of sandboxes that ever had a custom resource, and when each was first observed to end.
type history struct {
	mu    sync.Mutex
	uids  map[string]bool
	ended map[string]time.Time
}

func (s *history) add(uid string, ending bool, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.uids == nil {
		s.uids, s.ended = map[string]bool{}, map[string]time.Time{}
	}
	s.uids[uid] = true
	if _, known := s.ended[uid]; ending && !known {
		s.ended[uid] = now
	}
}

// missing records the end of every sandbox that is absent.
func (s *history) missing(present map[string]bool, now time.Time) {
	for uid := range s.all() {
		if !present[uid] {
			s.add(uid, true, now)
		}
	}
}

func (s *history) all() map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.uids)
}

func (s *history) ends() map[string]time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.ended)
}

// Watch records every custom resource until ctx ends. It reconnects when the API server was down.
func (o *Observer) Watch(ctx context.Context) {
	for ctx.Err() == nil {
		if err := o.watch(ctx); err != nil {
			timer := o.Clock.NewTimer(200 * time.Millisecond)
			select {
			case <-ctx.Done():
			case <-timer.C():
			}
			timer.Stop()
		}
	}
}

func (o *Observer) watch(ctx context.Context) error {
	var list v1alpha1.SandboxList
	if err := o.Kube.List(ctx, &list, client.InNamespace(o.Namespace)); err != nil {
		return err
	}
	present := map[string]bool{}
	for i := range list.Items {
		o.note(&list.Items[i], false)
		present[list.Items[i].EffectiveUID()] = true
	}
	o.history.missing(present, o.Clock.Now())
	w, err := o.Kube.Watch(ctx, &v1alpha1.SandboxList{}, client.InNamespace(o.Namespace),
		&client.ListOptions{Raw: listOptions(list.ResourceVersion)})
	if err != nil {
		return err
	}
	defer w.Stop()
	for e := range w.ResultChan() {
		if s, ok := e.Object.(*v1alpha1.Sandbox); ok {
			o.note(s, e.Type == watch.Deleted)
		}
	}
	return nil
}

func (o *Observer) note(s *v1alpha1.Sandbox, deleted bool) {
	if o.ours(s.Name) {
		o.history.add(s.EffectiveUID(), deleted || s.DeletionTimestamp != nil, o.Clock.Now())
	}
}

// garbage lists the dependents whose owner was deleted.
func (o *Observer) garbage(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var list corev1.ConfigMapList
	if err := o.Kube.List(ctx, &list, client.InNamespace(o.Namespace), client.MatchingLabels{GarbageLabel: o.Pool}); err != nil {
		return nil, fmt.Errorf("listing dependents: %w", err)
	}
	owners := map[types.UID]bool{}
	for i := range list.Items {
		owners[list.Items[i].UID] = true
	}
	var out []string
	for i := range list.Items {
		for _, ref := range list.Items[i].OwnerReferences {
			if !owners[ref.UID] {
				out = append(out, "ConfigMap "+list.Items[i].Name)
			}
		}
	}
	return out, nil
}

func (o *Observer) resources(ctx context.Context) ([]audit.Resource, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var list v1alpha1.SandboxList
	if err := o.Kube.List(ctx, &list, client.InNamespace(o.Namespace)); err != nil {
		return nil, fmt.Errorf("listing custom resources: %w", err)
	}
	var out []audit.Resource
	for i := range list.Items {
		s := &list.Items[i]
		if !o.ours(s.Name) {
			continue
		}
		o.note(s, false)
		out = append(out, o.resource(s))
	}
	return out, nil
}

func (o *Observer) resource(s *v1alpha1.Sandbox) audit.Resource {
	r := audit.Resource{
		Name: s.Name, UID: s.EffectiveUID(), RequestID: s.Annotations[v1alpha1.AnnotationRequestID],
		Phase: string(s.Status.Phase), Attempt: s.Status.Attempt, Deleting: s.DeletionTimestamp != nil,
		AgentLost:    apimeta.IsStatusConditionTrue(s.Status.Conditions, v1alpha1.ConditionAgentLost),
		Finished:     apimeta.IsStatusConditionTrue(s.Status.Conditions, v1alpha1.ConditionFinished),
		ExitCode:     s.Status.ExitCode,
		AutoRecreate: s.Spec.FailurePolicy == v1alpha1.FailurePolicyAutoRecreate, Label: s.Labels[o.Label],
	}
	if s.Spec.ExpireTime != nil {
		r.ExpireTime = s.Spec.ExpireTime.Time
	}
	if s.Status.AcceptedResetRevision != nil {
		r.AcceptedReset = s.Status.AcceptedResetRevision.Time
	}
	s.ManagedFields = nil
	raw, _ := yaml.Marshal(s)
	r.Dump = string(raw)
	a, err := s.Assignment()
	switch {
	case err != nil:
		r.Dump += "\nassignment: " + err.Error()
	case a != nil:
		r.AgentUID, r.Attempt = a.AgentUID, a.Attempt
	}
	return r
}
