// Package truth reads the actual state: the custom resources from the API server, each agent's report, and containerd
// with its remnants on the node. It never writes, and reads everything again each time; it keeps only which custom resources
// ever existed. Observe and Watch may be called concurrently.
package truth

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
)

// secretName is the Secret with a certificate that may read agents' reports.
const secretName = "allocator-client-tls"

// Observer reads the state from all three sources.
type Observer struct {
	// Kube reads uncached.
	Kube client.WithWatch
	// Node is the node's containerd, in the namespace of Kubernetes.
	Node *containerd.Client
	// Allocator reports its reservations.
	Allocator allocatorv1.AllocatorServiceClient
	Clock     clock.Clock
	// Namespace and Pool of the sandboxes; Prefix begins their names. System is the mesh's own namespace.
	Namespace, Pool, Prefix, System string
	// Snapshotter of the sandboxes. Dirs are directories with one entry for each container, named by its id.
	Snapshotter string
	Dirs        map[string]string
	// Label is the label that updates set.
	Label string

	tls      rpc.TLS
	baseline map[string]bool
	history  history
}

// Begin writes the certificate for agents to dir, and records the remnants that exist before the run.
func (o *Observer) Begin(ctx context.Context, dir string) error {
	var secret corev1.Secret
	if err := o.Kube.Get(ctx, client.ObjectKey{Namespace: o.System, Name: secretName}, &secret); err != nil {
		return fmt.Errorf("reading the certificate for agents: %w", err)
	}
	o.tls = rpc.TLS{CertFile: filepath.Join(dir, "tls.crt"), KeyFile: filepath.Join(dir, "tls.key"), CAFile: filepath.Join(dir, "ca.crt")}
	for _, path := range []string{o.tls.CertFile, o.tls.KeyFile, o.tls.CAFile} {
		if err := os.WriteFile(path, secret.Data[filepath.Base(path)], 0o600); err != nil {
			return fmt.Errorf("keeping the certificate for agents: %w", err)
		}
	}
	o.baseline = map[string]bool{}
	left, err := o.remnants(ctx, nil)
	for _, r := range left {
		o.baseline[r.Kind+" "+r.ID] = true
	}
	return err
}

// Observe reads everything. An error means that one of the sources cannot be read now.
func (o *Observer) Observe(ctx context.Context) (audit.Observations, error) {
	obs := audit.Observations{At: o.Clock.Now()}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() (err error) {
		obs.Resources, err = o.resources(ctx)
		return err
	})
	group.Go(func() error { return o.agents(ctx, &obs) })
	group.Go(func() error { return o.counts(ctx, &obs) })
	group.Go(func() (err error) {
		obs.Garbage, err = o.garbage(ctx)
		return err
	})
	group.Go(func() (err error) {
		all, ids, err := o.containers(ctx)
		if err != nil {
			return err
		}
		obs.Containers = all
		obs.Remnants, err = o.remnants(ctx, ids)
		return err
	})
	if err := group.Wait(); err != nil {
		return obs, err
	}
	obs.Seen, obs.Ended = o.history.all(), o.history.ends()
	return obs, nil
}

// Agents lists the pool's agent Pods.
func (o *Observer) Agents(ctx context.Context) ([]corev1.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var pods corev1.PodList
	err := o.Kube.List(ctx, &pods, client.InNamespace(o.Namespace), client.MatchingLabels{
		v1alpha1.LabelPool: o.Pool, v1alpha1.LabelComponent: v1alpha1.ComponentAgent,
	})
	if err != nil {
		return nil, fmt.Errorf("listing agent pods: %w", err)
	}
	return pods.Items, nil
}

// ours reports whether a sandbox belongs to this run.
func (o *Observer) ours(name string) bool { return strings.HasPrefix(name, o.Prefix) }
