//go:build integration

package rights_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/rights"
)

const (
	system   = "fast-sandbox-system"
	janitors = "fast-sandbox-janitor"
	// ns is a namespace with a pool, which the manifests bind to the controller.
	ns   = "default"
	node = "node-1"
	tick = 50 * time.Millisecond
	// audience of tokens of users.
	audience = "fast-sandbox.io"
)

// auditPolicy records every request, and each watch when it begins.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
`

// cluster is an API server with the manifests' accounts and rights, whose audit log is read, and the components as processes.
type cluster struct {
	t     *testing.T
	dir   string
	rest  *rest.Config
	admin client.Client
	kube  kubernetes.Interface
	pki   *pki.Authority
	ca    string // the file of its certificate
	audit string
	// rights are those of the manifests.
	rights []rights.Right
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	assets := config.Env("KUBEBUILDER_ASSETS")
	if assets == "" {
		assets = filepath.Join("..", "..", "bin", "k8s")
	}
	c := &cluster{t: t, dir: t.TempDir(), pki: pki.New(t)}
	c.ca = c.pki.TLS(t, rpc.RoleMetrics).CAFile
	c.audit = filepath.Join(c.dir, "audit.log")
	policy := filepath.Join(c.dir, "policy.yaml")
	require.NoError(t, os.WriteFile(policy, []byte(auditPolicy), 0o600))
	env := &envtest.Environment{CRDDirectoryPaths: []string{filepath.Join("..", "..", "deploy", "crd")}, ErrorIfCRDPathMissing: true, BinaryAssetsDirectory: assets}
	server := env.ControlPlane.GetAPIServer()
	server.CertDir = t.TempDir()
	server.Configure().Set("audit-policy-file", policy).Set("audit-log-path", c.audit).
		Append("disable-admission-plugins", "ServiceAccount").Append("enable-admission-plugins", "OwnerReferencesPermissionEnforcement")
	cfg, err := env.Start()
	require.NoError(t, err, "starting etcd and kube-apiserver from %s", assets)
	t.Cleanup(func() { require.NoError(t, env.Stop()) })
	cfg.QPS = -1
	scheme := runtime.NewScheme()
	require.NoError(t, clientgoscheme.AddToScheme(scheme))
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	c.rest = cfg
	c.admin, err = client.New(cfg, client.Options{Scheme: scheme})
	require.NoError(t, err)
	c.kube, err = kubernetes.NewForConfig(cfg)
	require.NoError(t, err)
	return c
}

// manifests returns the objects of directories and files below deploy.
func manifests(t *testing.T, paths ...string) []*unstructured.Unstructured {
	t.Helper()
	var out []*unstructured.Unstructured
	for _, path := range paths {
		objects, err := rights.Objects(filepath.Join("..", "..", "deploy", path))
		require.NoError(t, err)
		out = append(out, objects...)
	}
	return out
}

// grant creates the namespaces, accounts, roles and bindings among the objects, and expects that each of their rights is used.
func (c *cluster) grant(objects []*unstructured.Unstructured) {
	c.t.Helper()
	for _, kinds := range [][]string{{"Namespace"}, {"ServiceAccount", "Role", "ClusterRole"}, {"RoleBinding", "ClusterRoleBinding"}} {
		for _, o := range objects {
			for _, kind := range kinds {
				if o.GetKind() == kind {
					require.NoError(c.t, c.admin.Create(c.t.Context(), o.DeepCopy()))
				}
			}
		}
	}
	more, err := rights.Of(objects)
	require.NoError(c.t, err)
	c.rights = append(c.rights, more...)
}

// user creates a ServiceAccount with all rights, and returns a token of it for the components.
func (c *cluster) user(name string) string {
	c.t.Helper()
	require.NoError(c.t, c.admin.Create(c.t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}))
	require.NoError(c.t, c.admin.Create(c.t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "test-" + name},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: ns, Name: name}}}))
	return c.token(ns, name, audience)
}

func (c *cluster) token(namespace, name string, audiences ...string) string {
	c.t.Helper()
	r, err := c.kube.CoreV1().ServiceAccounts(namespace).CreateToken(c.t.Context(), name, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{Audiences: audiences, ExpirationSeconds: ptr.To[int64](3600)}}, metav1.CreateOptions{})
	require.NoError(c.t, err)
	return r.Status.Token
}

// account is the ServiceAccount of a component.
type account struct{ namespace, name string }

// kubeconfig writes the access of an account and returns its file.
func (c *cluster) kubeconfig(a account) string {
	c.t.Helper()
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["c"] = &clientcmdapi.Cluster{Server: c.rest.Host, CertificateAuthorityData: c.rest.CAData}
	cfg.AuthInfos["c"] = &clientcmdapi.AuthInfo{Token: c.token(a.namespace, a.name)}
	cfg.Contexts["c"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "c"}
	cfg.CurrentContext = "c"
	path := filepath.Join(c.dir, a.name+".kubeconfig")
	require.NoError(c.t, clientcmd.WriteToFile(*cfg, path))
	return path
}

// process is a component that runs.
type process struct {
	t    *testing.T
	name string
	log  string
	cmd  *exec.Cmd
	done chan struct{}
	stop func()
}

// run starts a binary with an account's kubeconfig. It is stopped by stop, or with the test.
func (c *cluster) run(binary string, a account, role rpc.Role, args ...string) *process {
	c.t.Helper()
	args = append([]string{"--kubeconfig=" + c.kubeconfig(a)}, c.common(role, args)...)
	return c.start(binary, exec.Command(built(binary), args...))
}

// runInPod does the same, with the files and variables that a Pod has, which the resolver of Services reads.
func (c *cluster) runInPod(binary string, a account, role rpc.Role, args ...string) *process {
	c.t.Helper()
	dir := c.t.TempDir()
	for name, content := range map[string]string{"token": c.token(a.namespace, a.name), "ca.crt": string(c.rest.CAData), "namespace": a.namespace} {
		require.NoError(c.t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	const script = `set -e; mount -t tmpfs none /run; mkdir -p /run/secrets/kubernetes.io/serviceaccount
cp "$1"/* /run/secrets/kubernetes.io/serviceaccount/; shift; exec "$@"`
	cmd := exec.Command("sh", append([]string{"-c", script, "sh", dir, built(binary)}, c.common(role, args)...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	host, port, err := net.SplitHostPort(strings.TrimPrefix(c.rest.Host, "https://"))
	require.NoError(c.t, err)
	cmd.Env = append(os.Environ(), "KUBERNETES_SERVICE_HOST="+host, "KUBERNETES_SERVICE_PORT="+port)
	return c.start(binary, cmd)
}

func (c *cluster) common(role rpc.Role, args []string) []string {
	files := c.pki.TLS(c.t, role)
	return append([]string{"-v=2", "--metrics-bind-address=0", "--health-socket=0",
		"--tls-ca-file=" + files.CAFile, "--tls-cert-file=" + files.CertFile, "--tls-key-file=" + files.KeyFile,
		"--tls-client-cert-file=" + files.ClientCertFile, "--tls-client-key-file=" + files.ClientKeyFile}, args...)
}

func (c *cluster) start(name string, cmd *exec.Cmd) *process {
	c.t.Helper()
	p := &process{t: c.t, name: name, log: filepath.Join(c.t.TempDir(), name+".log"), cmd: cmd, done: make(chan struct{})}
	out, err := os.Create(p.log)
	require.NoError(c.t, err)
	cmd.Stdout, cmd.Stderr = out, out
	require.NoError(c.t, cmd.Start())
	go func() {
		defer close(p.done)
		_ = cmd.Wait()
		_ = out.Close()
	}()
	p.stop = sync.OnceFunc(p.end)
	c.t.Cleanup(func() {
		p.stop()
		if c.t.Failed() {
			raw, _ := os.ReadFile(p.log)
			lines := slices.DeleteFunc(strings.SplitAfter(string(raw), "\n"), func(line string) bool { return strings.Contains(line, `"logger":"audit"`) })
			c.t.Logf("%s:\n%s", name, strings.Join(lines[max(0, len(lines)-30):], ""))
		}
	})
	return p
}

// end stops a process that must not have ended by itself.
func (p *process) end() {
	select {
	case <-p.done:
		p.t.Errorf("%s has ended by itself: %s", p.name, p.cmd.ProcessState)
		return
	default:
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(testkit.Timeout):
		_ = p.cmd.Process.Kill()
		<-p.done
		p.t.Errorf("%s did not stop", p.name)
	}
}

// built returns the path of a binary that make has built.
func built(name string) string {
	dir := config.Env("FSB_BIN")
	if dir == "" {
		dir = filepath.Join("..", "..", "bin")
	}
	return filepath.Join(dir, name)
}

// freeAddress returns an address on loopback that nothing listens on.
func freeAddress(t *testing.T) (address string, port int) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	return l.Addr().String(), l.Addr().(*net.TCPAddr).Port
}

// eventually waits for a condition.
func (c *cluster) eventually(what string, condition func(ctx context.Context) error) {
	c.t.Helper()
	var last error
	require.Eventually(c.t, func() bool {
		last = condition(c.t.Context())
		return last == nil
	}, testkit.Timeout, tick, "%s: %s", what, lazy(func() string { return fmt.Sprint(last) }))
}

// lazy is a message that is made when it is printed.
type lazy func() string

// String implements fmt.Stringer.
func (l lazy) String() string { return l() }
