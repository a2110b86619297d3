// Package cluster connects end-to-end tests to a running cluster: the public API, the Kubernetes API, the
// node's containerd, and the built command line. The addresses come from the environment that `make -s env` prints. A
// test that lacks something fails and says what; nothing is skipped. Everything may be called concurrently.
package cluster

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// The demo images, namespace and pool of the local overlay.
const (
	Busybox   = "docker.io/fast-sandbox/busybox:demo"
	Python    = "docker.io/fast-sandbox/python:demo"
	Namespace = "default"
	Pool      = "default"
)

// containerdNamespace is where Kubernetes and the agents keep their containers.
const containerdNamespace = "k8s.io"

// Env returns a variable that `make -s env` prints.
func Env(t testing.TB, name string) string {
	t.Helper()
	value := config.Env(name)
	require.NotEmpty(t, value, "%s is not set: run these tests by `make e2e`, or after: eval \"$(make -s env)\"", name)
	return value
}

// TLS is the client's certificate.
func TLS(t testing.TB) rpc.TLS {
	t.Helper()
	return rpc.TLS{CertFile: Env(t, "FSB_CERT"), KeyFile: Env(t, "FSB_KEY"), CAFile: Env(t, "FSB_CACERT")}
}

// Dial connects to the public API.
func Dial(t testing.TB) *grpc.ClientConn {
	t.Helper()
	conn, err := rpc.Dial(Env(t, "FSB_ADDR"), rpc.ClientConfig{TLS: TLS(t)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	return conn
}

// Kube connects to the Kubernetes API as its administrator.
func Kube(t testing.TB) client.Client {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", Env(t, "KUBECONFIG"))
	require.NoError(t, err)
	cfg.QPS, cfg.Burst = 200, 400
	scheme := runtime.NewScheme()
	require.NoError(t, clientgoscheme.AddToScheme(scheme))
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	require.NoError(t, err)
	return c
}

// Containerd connects to the node's containerd. The context selects the namespace of Kubernetes.
func Containerd(t testing.TB) (context.Context, *containerd.Client) {
	t.Helper()
	c, err := containerd.New(Env(t, "CONTAINERD_ADDRESS"), containerd.WithTimeout(10*time.Second))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return namespaces.WithNamespace(t.Context(), containerdNamespace), c
}

// Binary returns the path of a built binary.
func Binary(t testing.TB, name string) string {
	t.Helper()
	path := filepath.Join(Env(t, "FSB_BIN"), name)
	_, err := os.Stat(path)
	require.NoError(t, err, "build it with: make build grpcurl")
	return path
}

// Result is the output and exit code of a program.
type Result struct {
	Stdout, Stderr string
	Code           int
}

// Run runs a built binary to its end and returns its result.
func Run(t testing.TB, stdin, name string, args ...string) Result {
	t.Helper()
	return run(t, stdin, Binary(t, name), args...)
}

// Exec runs a program of the machine to its end and returns its result.
func Exec(t testing.TB, name string, args ...string) Result {
	t.Helper()
	return run(t, "", name, args...)
}

func run(t testing.TB, stdin, name string, args ...string) Result {
	t.Helper()
	// Cleanup functions run programs too, after the test's own context has ended.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	err := cmd.Run()
	if cmd.ProcessState == nil {
		require.NoError(t, err)
	}
	require.NoError(t, ctx.Err(), "%s %v did not end\nstdout: %s\nstderr: %s", name, args, stdout.String(), stderr.String())
	return Result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// OK is Run for a program that must succeed; it returns its standard output.
func OK(t testing.TB, name string, args ...string) string {
	t.Helper()
	r := Run(t, "", name, args...)
	require.Zero(t, r.Code, "%s %v\nstdout: %s\nstderr: %s", name, args, r.Stdout, r.Stderr)
	return r.Stdout
}
