// Package strike injects faults into the local cluster: it kills processes and Pods, stops processes for a while, and cuts
// networks. A fault that lasts is undone when its time is over or when the context ends; if the harness itself is killed,
// Begin undoes it at the next start. Strikes may overlap. Each one finds its target by Kubernetes and /proc at that time.
package strike

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/plan"
)

// lookTimeout bounds a read from the API server, which may be down because of a fault.
const lookTimeout = 3 * time.Second

// Striker injects faults. Its methods must not be called concurrently.
type Striker struct {
	Kube  client.Client
	Clock clock.WithTicker
	// Namespace and Pool of the agents; Janitors is the namespace of the janitors, System that of the other components.
	Namespace, Pool, System, Janitors string

	// The last known state, for times without an API server.
	holders map[string]string
	seen    map[string][]corev1.Pod
}

// fault injects one kind of fault and sets its target in out. For a fault that lasts it returns how to undo it.
type fault func(ctx context.Context, s *Striker, f plan.Fault, out *audit.Strike) (undo func() error, err error)

func faults() map[plan.Kind]fault {
	return map[plan.Kind]fault{
		plan.KillAllocator:  killLeader(allocator),
		plan.KillController: killLeader(controller),
		plan.KillAgent:      killAgent,
		plan.KillAgentPod:   killAgentPod,
		plan.KillContainerd: killNode("containerd"),
		plan.KillShim:       killShim,
		plan.KillAPIServer:  killNode("kube-apiserver"),
		plan.KillJanitor:    killPod(janitor),
		plan.KillGC:         killLeader(gc),
		plan.KillGateway:    killPod(gateway),
		plan.CutNetwork:     cutNetwork,
		plan.StallAllocator: stallAllocator,
	}
}

// Begin undoes what a previous run has left, and reads the Pods and leaders, so that faults can be injected while the API
// server is down.
func (s *Striker) Begin(ctx context.Context) error {
	s.holders, s.seen = map[string]string{}, map[string][]corev1.Pod{}
	if err := s.mend(ctx); err != nil {
		return err
	}
	for _, component := range []string{allocator, controller, gc} {
		if _, err := s.leader(ctx, component); err != nil {
			return err
		}
	}
	for _, component := range []string{janitor, gateway} {
		if _, err := s.component(ctx, component); err != nil {
			return err
		}
	}
	_, err := s.agents(ctx)
	return err
}

func (s *Striker) begin(ctx context.Context, f plan.Fault) (audit.Strike, func() error) {
	out := audit.Strike{Kind: string(f.Kind), At: s.Clock.Now()}
	undo, err := faults()[f.Kind](ctx, s, f, &out)
	if err != nil {
		out.Failed = err.Error()
	}
	return out, undo
}

func (s *Striker) finish(ctx context.Context, f plan.Fault, out *audit.Strike, undo func() error) {
	if undo == nil {
		return
	}
	timer := s.Clock.NewTimer(f.For)
	defer timer.Stop()
	select {
	case <-timer.C():
	case <-ctx.Done():
	}
	if err := undo(); err != nil {
		out.Failed = err.Error()
	}
	out.Lasted = s.Clock.Since(out.At)
}

// Run injects all faults, each at its time, and returns when the last is undone. It calls notify for each when it begins, one
// call at a time.
func (s *Striker) Run(ctx context.Context, all []plan.Fault, notify func(audit.Strike)) []audit.Strike {
	begin := s.Clock.Now()
	out := make([]audit.Strike, 0, len(all))
	var lasting sync.WaitGroup
	for _, f := range all {
		timer := s.Clock.NewTimer(begin.Add(f.At).Sub(s.Clock.Now()))
		select {
		case <-timer.C():
		case <-ctx.Done():
		}
		timer.Stop()
		if ctx.Err() != nil {
			break
		}
		strike, undo := s.begin(ctx, f)
		notify(strike)
		out = append(out, strike)
		mine := &out[len(out)-1] // out has room for all faults and is never reallocated
		lasting.Go(func() { s.finish(ctx, f, mine, undo) })
	}
	lasting.Wait()
	return out
}

// leader is the Pod that holds the component's Lease. Without a Lease it is any of its Pods that is ready.
func (s *Striker) leader(ctx context.Context, component string) (corev1.Pod, error) {
	pods, err := s.component(ctx, component)
	if err != nil {
		return corev1.Pod{}, err
	}
	look, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	var leases coordinationv1.LeaseList
	if err := s.Kube.List(look, &leases, client.InNamespace(s.System)); err == nil {
		for _, lease := range leases.Items {
			if !strings.Contains(lease.Name, component) {
				continue
			}
			if holder := podOf(ptr.Deref(lease.Spec.HolderIdentity, "")); belongs(holder, pods) {
				s.holders[component] = holder
			}
		}
	}
	for _, p := range pods {
		if p.Name == s.holders[component] {
			return p, nil
		}
	}
	for _, p := range pods {
		if p.Status.Phase == corev1.PodRunning {
			return p, nil
		}
	}
	return corev1.Pod{}, errors.New("no Pod of " + component + " runs")
}

// component lists the Pods of a component of the mesh.
func (s *Striker) component(ctx context.Context, name string) ([]corev1.Pod, error) {
	namespace := s.System
	if name == janitor {
		namespace = s.Janitors
	}
	return s.pods(ctx, namespace, name, client.MatchingLabels{"app.kubernetes.io/name": name})
}

func (s *Striker) agents(ctx context.Context) ([]corev1.Pod, error) {
	return s.pods(ctx, s.Namespace, "agent", client.MatchingLabels{v1alpha1.LabelPool: s.Pool, v1alpha1.LabelComponent: v1alpha1.ComponentAgent})
}

// pods lists Pods that are not being deleted; while the API server is down, those of the last list.
func (s *Striker) pods(ctx context.Context, namespace, key string, labels client.MatchingLabels) ([]corev1.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	var list corev1.PodList
	if err := s.Kube.List(ctx, &list, client.InNamespace(namespace), labels); err == nil {
		var alive []corev1.Pod
		for _, p := range list.Items {
			if p.DeletionTimestamp == nil && p.Status.PodIP != "" {
				alive = append(alive, p)
			}
		}
		s.seen[key] = alive
	}
	if len(s.seen[key]) == 0 {
		return nil, fmt.Errorf("no Pod of %s exists", key)
	}
	return s.seen[key], nil
}
