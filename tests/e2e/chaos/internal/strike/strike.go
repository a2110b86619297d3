// Package strike carries faults out on the local cluster: it kills processes and Pods, stalls them, and cuts networks.
// What lasts is undone when its time is over, when the context ends, and, should the harness itself be killed, by Begin
// at the next start. Strikes may overlap. Everything that it kills it finds anew by what Kubernetes says and /proc shows.
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

// lookTimeout bounds a look at the API server, which may be a fault's victim itself.
const lookTimeout = 3 * time.Second

// Striker carries faults out.
type Striker struct {
	Kube  client.Client
	Clock clock.WithTicker
	// Namespace and Pool of the agents; System is the namespace of allocator and controller.
	Namespace, Pool, System string

	// What was seen last, for when the API server cannot say.
	holders map[string]string
	seen    map[string][]corev1.Pod
}

// fault carries one kind of fault out and tells what it hit, and, if it is to last, how it is undone.
type fault func(ctx context.Context, s *Striker, f plan.Fault, out *audit.Strike) (undo func() error, err error)

func faults() map[plan.Kind]fault {
	return map[plan.Kind]fault{
		plan.KillAllocator:  killLeader(allocator),
		plan.KillController: killLeader(controller),
		plan.KillAgent:      killAgent,
		plan.KillAgentPod:   killAgentPod,
		plan.KillContainerd: killNode("containerd"),
		plan.KillAPIServer:  killNode("kube-apiserver"),
		plan.CutNetwork:     cutNetwork,
		plan.StallAllocator: stallAllocator,
	}
}

// Begin mends what a former run has left, and finds out who is there, so that faults can be carried out while the API
// server is away.
func (s *Striker) Begin(ctx context.Context) error {
	s.holders, s.seen = map[string]string{}, map[string][]corev1.Pod{}
	if err := s.mend(ctx); err != nil {
		return err
	}
	for _, component := range []string{allocator, controller} {
		if _, err := s.leader(ctx, component); err != nil {
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

// Run carries all faults out, each at its time, and returns when the last is undone. tell is called, one call at a time,
// for each when it begins.
func (s *Striker) Run(ctx context.Context, all []plan.Fault, tell func(audit.Strike)) []audit.Strike {
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
		tell(strike)
		out = append(out, strike)
		mine := &out[len(out)-1] // it stays where it is: out was made large enough for all
		lasting.Go(func() { s.finish(ctx, f, mine, undo) })
	}
	lasting.Wait()
	return out
}

// leader is the Pod that holds the component's Lease. Without a Lease it is any of its Pods that is ready.
func (s *Striker) leader(ctx context.Context, component string) (corev1.Pod, error) {
	pods, err := s.pods(ctx, s.System, component, client.MatchingLabels{"app.kubernetes.io/name": component})
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
	return corev1.Pod{}, errors.New("there is no " + component)
}

func (s *Striker) agents(ctx context.Context) ([]corev1.Pod, error) {
	return s.pods(ctx, s.Namespace, "agent", client.MatchingLabels{v1alpha1.LabelPool: s.Pool, v1alpha1.LabelComponent: v1alpha1.ComponentAgent})
}

// pods lists Pods that are not being deleted, or those that were seen last while the API server is away.
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
		return nil, fmt.Errorf("there is no Pod of the %s", key)
	}
	return s.seen[key], nil
}
