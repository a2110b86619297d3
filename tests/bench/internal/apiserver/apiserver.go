// Package apiserver gives a suite an API server with etcd of its own, with our custom resources and certificates for our
// components, and fills it with what a cluster would have there. All methods of a Server that was started may be called
// concurrently.
package apiserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
)

const (
	// writers is how many calls fill the API server at a time.
	writers = 24
	// startTime is how long the API server and etcd may take to start, and to stop.
	startTime = 90 * time.Second
)

// Options say what is started.
type Options struct {
	// Bin has k8s/ with the API server and etcd; all that is written goes to Dir.
	Bin, Dir string
	// Flags of the API server, beside those that it always has.
	Flags map[string]string
	// Roles that need a certificate.
	Roles []rpc.Role
}

// Server is an API server.
type Server struct {
	// Kube is its administrator's client, without limits; Kubeconfig a file for the administrator.
	Kube       client.WithWatch
	Kubeconfig string
	// Admin is the certificate of a user of our servers who may do everything.
	Admin rpc.TLS

	dir    string
	env    *envtest.Environment
	issuer *pki.Authority
	issued map[rpc.Role]rpc.TLS
}

// Start starts an API server with etcd. What it returns must be stopped even where there is an error.
func Start(o Options) (*Server, error) {
	s := &Server{dir: o.Dir, issued: map[rpc.Role]rpc.TLS{}, Kubeconfig: filepath.Join(o.Dir, "kubeconfig")}
	log.SetLogger(logr.Discard())
	crds := envtest.CRDInstallOptions{Paths: []string{filepath.Join("deploy", "crd")}, ErrorIfPathMissing: true}
	if err := envtest.ReadCRDFiles(&crds); err != nil {
		return s, fmt.Errorf("reading the custom resources' definitions: %w", err)
	}
	withoutStatusCalls(&crds)
	s.env = &envtest.Environment{
		CRDs: crds.CRDs, BinaryAssetsDirectory: filepath.Join(o.Bin, "k8s"), ControlPlaneStartTimeout: startTime, ControlPlaneStopTimeout: startTime,
	}
	api := s.env.ControlPlane.GetAPIServer()
	api.CertDir, s.env.ControlPlane.Etcd = filepath.Join(o.Dir, "apiserver"), &envtest.Etcd{DataDir: filepath.Join(o.Dir, "etcd")}
	for _, dir := range []string{api.CertDir, s.env.ControlPlane.Etcd.DataDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return s, fmt.Errorf("making a directory: %w", err)
		}
	}
	api.Configure().Append("disable-admission-plugins", "ServiceAccount").
		Append("max-requests-inflight", "2000").Append("max-mutating-requests-inflight", "1000")
	for name, value := range o.Flags {
		api.Configure().Set(name, value)
	}
	cfg, err := s.env.Start()
	if err != nil {
		return s, fmt.Errorf("starting etcd and kube-apiserver: %w", err)
	}
	if err := os.WriteFile(s.Kubeconfig, s.env.KubeConfig, 0o600); err != nil {
		return s, fmt.Errorf("writing a kubeconfig: %w", err)
	}
	cfg.QPS, cfg.Burst = -1, -1
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), coordinationv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme), metav1.AddMetaToScheme(scheme)); err != nil {
		return s, fmt.Errorf("registering types: %w", err)
	}
	if s.Kube, err = client.NewWithWatch(cfg, client.Options{Scheme: scheme}); err != nil {
		return s, fmt.Errorf("connecting to Kubernetes: %w", err)
	}
	issuer, err := pki.Make(o.Dir)
	if err != nil {
		return s, err
	}
	s.issuer = issuer
	for _, role := range o.Roles {
		if s.issued[role], err = issuer.Issue(role); err != nil {
			return s, err
		}
	}
	if s.Admin, err = issuer.IssueUser("admin", "system:masters"); err != nil {
		return s, err
	}
	return s, nil
}

// withoutStatusCalls lets a create set the status, which takes a second call otherwise: filling the API server is no part
// of a measurement, and no measured component writes a status.
func withoutStatusCalls(crds *envtest.CRDInstallOptions) {
	for _, crd := range crds.CRDs {
		if crd.Spec.Names.Kind != "Sandbox" {
			continue
		}
		for i := range crd.Spec.Versions {
			crd.Spec.Versions[i].Subresources = nil
		}
	}
}

// TLS returns the certificates of a role that was asked for.
func (s *Server) TLS(role rpc.Role) rpc.TLS { return s.issued[role] }

// AgentTLS issues the certificate of an agent.
func (s *Server) AgentTLS(info *agentv1.AgentInfo) (rpc.TLS, error) {
	return s.issuer.IssueAgent(rpc.AgentID{Namespace: info.GetNamespace(), Pod: info.GetPodName(), UID: info.GetPodUid()})
}

// User makes a user who may do everything, under a name by which the API server knows who asks, and returns a kubeconfig file.
func (s *Server) User(name string) (string, error) {
	user, err := s.env.AddUser(envtest.User{Name: name, Groups: []string{"system:masters"}}, nil)
	if err != nil {
		return "", fmt.Errorf("making user %s: %w", name, err)
	}
	raw, err := user.KubeConfig()
	if err != nil {
		return "", fmt.Errorf("making a kubeconfig of user %s: %w", name, err)
	}
	path := filepath.Join(s.dir, name+".kubeconfig")
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		return "", fmt.Errorf("writing a kubeconfig: %w", err)
	}
	return path, nil
}

// Stop ends both.
func (s *Server) Stop() error {
	if s.env == nil {
		return nil
	}
	return s.env.Stop()
}

// Each calls f with every number below n, several at a time, until one fails.
func Each(ctx context.Context, n int, f func(context.Context, int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(writers)
	for i := range n {
		if ctx.Err() != nil {
			break
		}
		g.Go(func() error { return f(ctx, i) })
	}
	return g.Wait()
}
