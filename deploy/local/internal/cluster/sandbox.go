package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes"

	corev1 "k8s.io/api/core/v1"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/pki"
)

const (
	applyTimeout  = time.Minute
	applyInterval = 500 * time.Millisecond
)

// installSandbox puts Fast Sandbox's certificates and, if there are any, the manifests into the cluster.
func installSandbox(ctx context.Context, o Options, digests map[string]string, p *progress) error {
	identities, err := ensureSandboxPKI(o.Config, time.Now())
	if err != nil {
		return err
	}
	set, err := client(o.Config)
	if err != nil {
		return err
	}
	if err := applySecrets(ctx, set, identities); err != nil {
		return err
	}
	p.say("namespaces %s and their certificates are applied", strings.Join(pki.Namespaces(), ", "))
	if o.Manifests == "" {
		return nil
	}
	if err := applyManifests(ctx, o, digests); err != nil {
		return err
	}
	p.say("manifests %s are applied; next: waiting until their Pods are ready", o.Manifests)
	return waitRollouts(ctx, set, p)
}

func applySecrets(ctx context.Context, set kubernetes.Interface, identities map[string]identity) error {
	options := metav1.ApplyOptions{FieldManager: "fsb-local", Force: true}
	for _, namespace := range pki.Namespaces() {
		if _, err := set.CoreV1().Namespaces().Apply(ctx, applycorev1.Namespace(namespace), options); err != nil {
			return fmt.Errorf("applying a namespace: %w", err)
		}
	}
	for name, identity := range identities {
		secret := applycorev1.Secret(name, identity.namespace).WithType(corev1.SecretTypeTLS).
			WithData(map[string][]byte{
				"ca.crt": identity.ca, corev1.TLSCertKey: identity.cert, corev1.TLSPrivateKeyKey: identity.key,
			})
		if _, err := set.CoreV1().Secrets(identity.namespace).Apply(ctx, secret, options); err != nil {
			return fmt.Errorf("applying a secret: %w", err)
		}
	}
	return nil
}

// applyManifests applies a kustomize directory, or plain files, with the digests of our images noted in them.
func applyManifests(ctx context.Context, o Options, digests map[string]string) error {
	text, err := render(ctx, o)
	if err != nil {
		return err
	}
	if text, err = noteDigests(text, digests); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, applyTimeout)
	defer cancel()
	return host.Poll(ctx, applyInterval, func(ctx context.Context) error {
		_, err := kubectl(ctx, o.Config, text, "apply", "--server-side", "--force-conflicts", "-f", "-")
		// A custom resource beside its definition: the first attempt creates only the definition. The other errors are those of
		// an API server that has just started.
		if err != nil && !transient(err.Error()) {
			return host.Permanent(err)
		}
		return err
	})
}

func transient(message string) bool {
	for _, part := range []string{"no matches for kind", "ensure CRDs are installed first", "connection refused",
		"etcdserver: ", "the server could not find the requested resource"} {
		if strings.Contains(message, part) {
			return true
		}
	}
	return false
}

// render returns the YAML of the manifests.
func render(ctx context.Context, o Options) (string, error) {
	info, err := os.Stat(o.Manifests)
	if err != nil {
		return "", fmt.Errorf("looking for the manifests: %w", err)
	}
	if !info.IsDir() {
		raw, err := os.ReadFile(o.Manifests)
		if err != nil {
			return "", fmt.Errorf("reading the manifests: %w", err)
		}
		return string(raw), nil
	}
	for _, name := range []string{"kustomization.yaml", "kustomization.yml", "Kustomization"} {
		if _, err := os.Stat(filepath.Join(o.Manifests, name)); err == nil {
			return kubectl(ctx, o.Config, "", "kustomize", "--load-restrictor=LoadRestrictionsNone", o.Manifests)
		}
	}
	return "", errors.New("reading the manifests: " + o.Manifests + " has no kustomization.yaml")
}
