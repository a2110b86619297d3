package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
)

const nodeTimeout = 2 * time.Minute

// waitNode waits until Pods can be scheduled: the node is Ready and the default service account exists.
func waitNode(ctx context.Context, c components.Config, p *progress) error {
	set, err := client(c)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, nodeTimeout)
	defer cancel()
	err = host.Poll(ctx, readyInterval, func(ctx context.Context) error {
		node, err := set.CoreV1().Nodes().Get(ctx, components.NodeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if ready, why := nodeReady(node); !ready {
			return errors.New(why)
		}
		_, err = set.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	if err != nil {
		return fmt.Errorf("waiting for the node (see `fsb-local logs kubelet`): %w", err)
	}
	p.say("node %s is ready; next: installing Fast Sandbox", components.NodeName)
	return nil
}

// nodeReady reports whether the node accepts Pods, and if not, why.
func nodeReady(node *corev1.Node) (ready bool, why string) {
	i := slices.IndexFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady })
	switch {
	case i < 0:
		return false, "the kubelet has not reported yet"
	case node.Status.Conditions[i].Status != corev1.ConditionTrue:
		return false, node.Status.Conditions[i].Message
	case slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeNotReady }):
		return false, "the not-ready taint is not lifted yet"
	}
	return true, ""
}
