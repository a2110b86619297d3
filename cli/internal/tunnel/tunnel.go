// Package tunnel reaches a Kubernetes cluster from a person's machine: it finds Pods, connects to their ports through the API
// server, as `kubectl port-forward` does but without a local port, and reads Sandboxes, kinds of objects and names. It changes
// nothing in the cluster. It does not encrypt or authenticate what is sent to a Pod: its callers do. All of it may be called
// concurrently.
package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Reasons of this package's errors; no server of the project sends them.
const (
	// ReasonNoCluster: there is no kubeconfig, or it is invalid.
	ReasonNoCluster fault.Reason = "NO_CLUSTER"
	// ReasonCluster: the API server cannot be reached, or refuses the request.
	ReasonCluster fault.Reason = "CLUSTER_REFUSED"
	// ReasonPod: the Pod, or the port in it, cannot be reached through the API server.
	ReasonPod fault.Reason = "POD_UNREACHABLE"
)

// Options select a cluster.
type Options struct {
	// Kubeconfig is the file to read, Context the context in it. Empty: that of kubectl.
	Kubeconfig, Context string
	// Getenv reads the environment.
	Getenv func(string) string
}

// Selector selects Pods.
type Selector struct {
	// Namespace of the Pods.
	Namespace string
	// Labels is a label selector. Node is their node; empty means any.
	Labels, Node string
}

// Pod is a running Pod.
type Pod struct {
	// Namespace, Name and Node of the Pod.
	Namespace, Name, Node string
	// Ports by name.
	Ports map[string]int32
	// Ready reports whether the Pod is ready.
	Ready bool
}

// Cluster is a cluster. Open returns one.
type Cluster struct {
	config *rest.Config
	core   *rest.RESTClient
}

// Open finds the cluster. It asks the API server nothing. The error is errdefs.ErrFailedPrecondition if no configuration
// says where the cluster is.
func Open(o Options) (*Cluster, error) {
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules(o), &clientcmd.ConfigOverrides{CurrentContext: o.Context})
	config, err := loader.ClientConfig()
	if err != nil {
		return nil, fault.New(errdefs.ErrFailedPrecondition, ReasonNoCluster, "finding the cluster: %s", err)
	}
	return New(config)
}

// New is the cluster of a configuration.
func New(config *rest.Config) (*Cluster, error) {
	// Only Pods are decoded: a client of the whole API is larger than the rest of the program.
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("registering Pods: %w", err)
	}
	core := rest.CopyConfig(config)
	core.APIPath, core.GroupVersion = "/api", &corev1.SchemeGroupVersion
	core.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	client, err := rest.RESTClientFor(core)
	if err != nil {
		return nil, fault.New(errdefs.ErrFailedPrecondition, ReasonNoCluster, "finding the cluster: %s", err)
	}
	return &Cluster{config: config, core: client}, nil
}

// rules returns the files that kubectl reads. A file that is set must exist.
func rules(o Options) *clientcmd.ClientConfigLoadingRules {
	if o.Kubeconfig != "" {
		return &clientcmd.ClientConfigLoadingRules{ExplicitPath: o.Kubeconfig}
	}
	if list := o.Getenv(clientcmd.RecommendedConfigPathEnvVar); list != "" {
		return &clientcmd.ClientConfigLoadingRules{Precedence: filepath.SplitList(list)}
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return &clientcmd.ClientConfigLoadingRules{}
	}
	return &clientcmd.ClientConfigLoadingRules{Precedence: []string{
		filepath.Join(home, clientcmd.RecommendedHomeDir, clientcmd.RecommendedFileName)}}
}

// Pods returns the running Pods, sorted by node and name. Safe to retry.
func (c *Cluster) Pods(ctx context.Context, s Selector) ([]Pod, error) {
	options := metav1.ListOptions{LabelSelector: s.Labels, FieldSelector: "status.phase=Running"}
	if s.Node != "" {
		options.FieldSelector += ",spec.nodeName=" + s.Node
	}
	var list corev1.PodList
	err := c.core.Get().Namespace(s.Namespace).Resource("pods").VersionedParams(&options, metav1.ParameterCodec).Do(ctx).Into(&list)
	if err != nil {
		return nil, refused("listing Pods", err)
	}
	out := make([]Pod, 0, len(list.Items))
	for i := range list.Items {
		if p := &list.Items[i]; p.DeletionTimestamp.IsZero() {
			out = append(out, podOf(p))
		}
	}
	slices.SortFunc(out, func(a, b Pod) int {
		if order := strings.Compare(a.Node, b.Node); order != 0 {
			return order
		}
		return strings.Compare(a.Name, b.Name)
	})
	return out, nil
}

func podOf(p *corev1.Pod) Pod {
	pod := Pod{Namespace: p.Namespace, Name: p.Name, Node: p.Spec.NodeName, Ports: map[string]int32{}}
	for _, container := range p.Spec.Containers {
		for _, port := range container.Ports {
			pod.Ports[port.Name] = port.ContainerPort
		}
	}
	pod.Ready = slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
	return pod
}

// refused classifies an error of the API server or of the connection to it.
func refused(doing string, err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%s: %w", doing, err)
	}
	var class error = errdefs.ErrUnavailable
	text := err.Error()
	switch {
	case apierrors.IsUnauthorized(err):
		class = errdefs.ErrUnauthenticated
	case apierrors.IsForbidden(err):
		class = errdefs.ErrPermissionDenied
	case apierrors.IsNotFound(err):
		class = errdefs.ErrNotFound
	case apierrors.IsBadRequest(err), apierrors.IsInvalid(err):
		class = errdefs.ErrInvalidArgument
	}
	var broken *url.Error
	var dial *net.OpError
	if errors.As(err, &broken) {
		text = broken.Err.Error() // without the URL of the request
	}
	if errors.As(err, &dial) && dial.Addr != nil {
		text = fmt.Sprintf("the API server at %s: %s", dial.Addr, dial.Err)
	}
	return fault.New(class, ReasonCluster, "%s: %s", doing, text)
}
